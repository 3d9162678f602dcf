#include "moesh/fsdp/reduce.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "moesh/fsdp/flat.h"
#include "moesh/fsdp/step_state.h"
#include "moesh/kernels/update.h"
#include "moesh/spmd/attach.h"

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
