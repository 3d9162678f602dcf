#include "moesh/fsdp/reduce.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <deque>
#include <numeric>
#include <utility>

#include "moesh/fsdp/step_state.h"
#include "moesh/kernels/update.h"
#include "moesh/spmd/attach.h"

namespace moesh::raw {

Flat::Flat(std::vector<FlatPart> parts, int num_ranks)
    : parts_(std::move(parts)), num_ranks_(num_ranks) {
  for (int r = 0; r < num_ranks_; ++r) rank_sizes_.push_back(offset(parts_.size(), r));
}

std::int64_t Flat::numel() const {
  return std::accumulate(rank_sizes_.begin(), rank_sizes_.end(), std::int64_t{0});
}

std::int64_t Flat::length(std::size_t i, int rank) const {
  const FlatPart& p = parts_[i];
  return num_ranks_ == 1 ? p.shape[static_cast<std::size_t>(p.dim)]
                         : p.sizes[static_cast<std::size_t>(rank)];
}

std::int64_t Flat::inner(std::size_t i) const {
  std::int64_t n = 1;
  for (std::size_t d = 0; d < parts_[i].shape.size(); ++d)
    if (static_cast<std::int64_t>(d) != parts_[i].dim) n *= parts_[i].shape[d];
  return n;
}

std::int64_t Flat::offset(std::size_t i, int rank) const {
  std::int64_t sum = 0;
  for (std::size_t j = 0; j < i; ++j) sum += length(j, rank) * inner(j);
  return sum;
}

at::Tensor Flat::rows_of(const at::Tensor& message_of_rank, std::size_t i, int rank) const {
  const FlatPart& p = parts_[i];
  std::vector<std::int64_t> shape{length(i, rank)};
  for (std::size_t d = 0; d < p.shape.size(); ++d)
    if (static_cast<std::int64_t>(d) != p.dim) shape.push_back(p.shape[d]);
  return message_of_rank.narrow(0, offset(i, rank), shape[0] * inner(i)).view(shape);
}

template <class F>
void Flat::each_rank(const at::Tensor& message, std::size_t i, const F& f) const {
  if (message.is_meta()) return;  // there is nothing to copy, and an estimate may have 2048 ranks
  std::int64_t first = 0, row = 0;
  for (int r = 0; r < num_ranks_; ++r) {
    const std::int64_t size = rank_sizes_[static_cast<std::size_t>(r)];
    f(rows_of(message.narrow(0, first, size), i, r), row);
    first += size, row += length(i, r);
  }
}

void Flat::put_whole(const at::Tensor& message, std::size_t i, const at::Tensor& whole) const {
  const at::Tensor rows = whole.movedim(parts_[i].dim, 0);
  each_rank(message, i, [&](const at::Tensor& to, std::int64_t row) {
    to.copy_(rows.narrow(0, row, to.size(0)));
  });
}

void Flat::put_part(const at::Tensor& message_of_rank, std::size_t i, const at::Tensor& part,
                    int rank) const {
  rows_of(message_of_rank, i, rank).copy_(part.movedim(parts_[i].dim, 0));
}

void Flat::take_whole(const at::Tensor& message, std::size_t i, const at::Tensor& rows) const {
  each_rank(message, i, [&](const at::Tensor& from, std::int64_t row) {
    rows.narrow(0, row, from.size(0)).copy_(from);
  });
}

at::Tensor Flat::part_of_rank(const at::Tensor& message_of_rank, std::size_t i, int rank) const {
  return rows_of(message_of_rank, i, rank).movedim(0, parts_[i].dim);
}

}  // namespace moesh::raw

namespace moesh {

namespace raw {

// Terms that travel together.
struct Bucket {
  std::vector<GradientTerm> terms;  // without their values, once they travel
  Flat flat;
  comm::Handle handle;
  std::int64_t block;  // terms of how many places were started before, and its own
};

namespace {

// Gradients are held in full until they are awaited: of a large model those of two blocks, however
// many messages they make.
constexpr std::int64_t kMostBlocks = 2;

bool belong_together(const GradientTerm& a, const GradientTerm& b) {
  return a.storage == b.storage && a.replicas == b.replicas && a.dtype == b.dtype;
}

void check_same(const GradientTerm& term, const at::Tensor& sum) {
  term.same_work->expect_same(sum, "d(" + term.name + ")");
}

// The name in a profiler: "start to reduce layers.2.norm .. layers.2.moe.w1 (12 gradients)".
std::string scope_name(const char* what, const std::vector<GradientTerm>& terms) {
  return std::string(what) + " " + terms.front().name +
         (terms.size() > 1 ? " .. " + terms.back().name : "") + " (" +
         std::to_string(terms.size()) + (terms.size() > 1 ? " gradients)" : " gradient)");
}

at::Tensor reduce_now(const GradientTerm& term) {
  // The reduction is in the precision of the master weights.
  at::Tensor sum = kernels::cast(term.grad, term.dtype);
  if (term.storage->size() > 1)
    sum = run(Step::reduce_scatter, sum, *term.storage, term.dim, term.sizes);
  sum = term.replicas->all_reduce(sum);
  check_same(term, sum);
  return sum;
}

bool is_narrow(const at::Tensor& grad, const at::Tensor& leaf) {
  return grad.scalar_type() != leaf.scalar_type();
}

// A gradient of backward stays in the type of the work until something is added to it. It may be
// the gradient of something else as well, so it is never written to.
void add_to_leaf(const at::Tensor& leaf, const at::Tensor& sum) {
  RECORD_USER_SCOPE("add to a gradient");
  at::Tensor& grad = at::Tensor(leaf).mutable_grad();
  if (!grad.defined())
    grad = is_narrow(sum, leaf) ? sum.contiguous() : sum.clone(at::MemoryFormat::Contiguous);
  else
    grad = kernels::cast(grad, leaf.scalar_type()).add_(kernels::cast(sum, leaf.scalar_type()));
}

}  // namespace

struct Reductions {
  std::vector<GradientTerm> open;  // of the bucket that backward is in
  std::deque<Bucket> started;
  std::int64_t num_blocks = 0;

  void start() {
    if (open.empty()) return;
    const at::NoGradGuard no_grad;
    ++num_blocks;
    while (!started.empty() && started.front().block <= num_blocks - kMostBlocks) await_first();
    while (!open.empty()) {
      const auto end = std::stable_partition(
          open.begin(), open.end(),
          [first = open.front()](const GradientTerm& t) { return belong_together(first, t); });
      std::vector<GradientTerm> together(open.begin(), end);
      open.erase(open.begin(), end);
      start(std::move(together));
    }
  }

  void start(std::vector<GradientTerm> terms) {
    RECORD_USER_SCOPE(scope_name("start to reduce", terms));
    const GradientTerm& first = terms[0];
    std::vector<FlatPart> parts;
    for (const auto& t : terms) parts.push_back({t.grad.sizes().vec(), t.dim, t.sizes});
    const int num_ranks = first.storage->size();
    Flat flat(std::move(parts), num_ranks);
    const at::Tensor message = at::empty({flat.numel()}, first.grad.options().dtype(first.dtype));
    for (std::size_t i = 0; i < terms.size(); ++i) {
      flat.put_whole(message, i, terms[i].grad);
      terms[i].grad.reset();
    }
    comm::Handle handle = num_ranks > 1
                              ? first.storage->start_reduce_scatter(message, flat.rank_sizes())
                              : first.replicas->start_all_reduce(message);
    started.push_back({std::move(terms), std::move(flat), std::move(handle), num_blocks});
  }

  void await_first() {
    Bucket& bucket = started.front();
    RECORD_USER_SCOPE(scope_name("await the sum of", bucket.terms));
    const at::NoGradGuard no_grad;
    const GradientTerm& first = bucket.terms[0];
    at::Tensor sum = bucket.handle.wait();
    if (first.storage->size() > 1) sum = first.replicas->all_reduce(sum);
    for (std::size_t i = 0; i < bucket.terms.size(); ++i) {
      const at::Tensor mine = bucket.flat.part_of_rank(sum, i, first.storage->rank());
      check_same(bucket.terms[i], mine);
      add_to_leaf(bucket.terms[i].leaf, mine);
    }
    started.pop_front();
  }
};

std::shared_ptr<Reductions> make_reductions() { return std::make_shared<Reductions>(); }

at::Tensor reduce(const GradientTerm& term, const std::shared_ptr<Reductions>& reductions) {
  const bool is_sum = term.storage->size() > 1 || term.replicas->size() > 1;
  if (is_sum && reductions) {
    reductions->open.push_back(term);
    return {};
  }
  // All ranks have gradients of one type, even for weights that only one of them has.
  if (is_sum || current_mesh().shape().num_ranks() > 1 || !is_narrow(term.grad, term.leaf))
    return reduce_now(term);
  check_same(term, term.grad);
  add_to_leaf(term.leaf, term.grad);
  return {};
}

void reduce_to_leaf(const GradientTerm& term, const std::shared_ptr<Reductions>& reductions) {
  const at::Tensor sum = reduce(term, reductions);
  if (sum.defined()) add_to_leaf(term.leaf, sum);
}

at::Tensor begin_bucket(const at::Tensor& x) {
  const StepState* step = StepState::current();
  if (!step || !step->reductions) return x;
  return attach(x, x.detach(),
                [sums = step->reductions, later = step->weights_later](const at::Tensor& grad) {
                  // Gradients that were left for later come then, and end then.
                  if (later)
                    later->add([sums] { sums->start(); });
                  else
                    sums->start();
                  return grad;
                });
}

}  // namespace raw

void StepState::start_sums() {
  if (reductions) reductions->start();
}

void StepState::finish_sums() {
  if (!reductions) return;
  reductions->start();
  while (!reductions->started.empty()) reductions->await_first();
}

}  // namespace moesh
