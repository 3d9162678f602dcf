#include "moesh/fsdp/reshard.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "moesh/fsdp/reduce.h"
#include "moesh/fsdp/step_state.h"
#include "moesh/kernels/quantized.h"
#include "moesh/kernels/update.h"
#include "moesh/spmd/attach.h"

namespace moesh {

namespace raw {

// One parameter to be gathered, or cast: what this rank has of it, and how the ranks divide it.
struct Gathered {
  at::Tensor source;  // in the dtype of the master weights, or of the work
  std::shared_ptr<const kernels::QuantizedBox>
      quantized;  // then `source` is empty; null: it is not
  at::ScalarType compute;
  std::shared_ptr<comm::Group> group;  // null: only cast
  FlatPart part;
  at::Tensor rows = {};  // [whole along part.dim first, ..], contiguous: what autograd has saved
  size_t num_bytes = 0;  // of the whole
};

// Parameters of one group and dtype that travel in one message.
struct Arrival {
  Flat flat;
  comm::Handle handle;
  at::Tensor message = {};  // once it is here

  const at::Tensor& wait() {
    if (!message.defined()) message = handle.wait();
    return message;
  }
};

// A parameter in a message that was started ahead.
struct Pending {
  std::shared_ptr<Arrival> arrival;
  size_t number;  // in the message
  size_t num_bytes;
  std::int64_t version;  // of the value: an update in between makes the gather stale
  int num_takers;        // that are still to come
};

// A parameter that is cast already.
struct CastAhead {
  at::Tensor rows;
  std::int64_t version;
};

// The gathers of a step. Parameters are named by their value.
struct Gathering {
  std::map<const void*, Pending> pending;
  std::map<const void*, CastAhead> cast_ahead;
  bool keeps = false;
  std::map<const void*, at::Tensor> kept;  // undefined: not gathered yet
  int num_takers = 1;  // micro-batches that are under way at once, each of which uses it
  GatherBytes bytes;

  void count(std::int64_t change) {
    bytes.now += change;
    bytes.most = std::max(bytes.most, bytes.now);
  }
};

struct Gathers {
  std::shared_ptr<Gathering> step;  // null: outside of one nothing is freed
  std::vector<Gathered> all;
  std::shared_ptr<Gathers> before;  // of the block before this one, whose backward comes after
  // Under way for backward: the messages, and which of `all` are in each.
  std::vector<std::pair<std::shared_ptr<Arrival>, std::vector<size_t>>> again;
};

}  // namespace raw

namespace {

using raw::Arrival;
using raw::Gathered;

// A rank is a thread, and layers call use(w): they know nothing of steps.
thread_local StepState* innermost = nullptr;

// The gathers of the current step; null: there is none.
std::shared_ptr<raw::Gathering> gathering() {
  const StepState* step = StepState::current();
  return step ? step->gathering : nullptr;
}

const void* key_of(const Stored& w) { return w.value.unsafeGetTensorImpl(); }

void resize(const at::Tensor& t, size_t num_bytes) {
  auto* storage = t.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(storage->allocator()->allocate(num_bytes));
  storage->set_nbytes(num_bytes);
}

void free(raw::Gathers& gathers) {
  for (auto& g : gathers.all) {
    if (g.rows.storage().nbytes() == 0) continue;
    resize(g.rows, 0);
    gathers.step->count(-static_cast<std::int64_t>(g.num_bytes));
  }
}

// The tensor that is cast and gathered: the copy in the type of the work, if there is one.
at::Tensor source_of(const Stored& w) {
  const at::Tensor copy = raw::current_copy(w);
  return copy.defined() ? copy : w.value.detach();
}

Gathered gathered(const Stored& w, const std::shared_ptr<comm::Group>& group) {
  const auto compute = w.spec.of_work();
  std::int64_t numel = 1;
  for (auto n : w.compute.length) numel *= n;
  return {.source = source_of(w),
          .quantized = w.quantized,
          .compute = compute,
          .group = group,
          .part = {w.compute.length, w.spec.storage_dim, w.storage_sizes},
          .num_bytes = static_cast<size_t>(numel) * c10::elementSize(compute)};
}

// This rank's part of it, in the type of the work.
at::Tensor own_numbers(const Gathered& g) {
  return g.quantized ? kernels::dequantize(*g.quantized, g.compute)
                     : kernels::cast(g.source, g.compute);
}

// One message for each group and dtype, in the order of the first parameter of each: f(message,
// which of `all` are in it).
template <class F>
void start_messages(const std::vector<Gathered>& all, std::vector<size_t> left, const F& f) {
  RECORD_USER_SCOPE("start to gather parameters");
  while (!left.empty()) {
    const Gathered& first = all[left[0]];
    const auto end = std::stable_partition(left.begin(), left.end(), [&](size_t i) {
      return all[i].group == first.group && all[i].compute == first.compute;
    });
    const std::vector<size_t> together(left.begin(), end);
    std::vector<raw::FlatPart> parts;
    for (const size_t i : together) parts.push_back(all[i].part);
    const int rank = first.group->rank();
    raw::Flat flat(std::move(parts), first.group->size());
    const at::Tensor mine = at::empty({flat.rank_sizes()[static_cast<size_t>(rank)]},
                                      first.source.options().dtype(first.compute));
    // Cast before the gather: fewer bytes travel.
    for (size_t k = 0; k < together.size(); ++k) {
      const Gathered& g = all[together[k]];
      flat.put_part(mine, k, g.quantized ? own_numbers(g) : g.source, rank);
    }
    comm::Handle handle = first.group->start_all_gather(mine, flat.rank_sizes());
    f(std::make_shared<Arrival>(Arrival{std::move(flat), std::move(handle)}), together);
    left.erase(left.begin(), end);
  }
}

void start_again(raw::Gathers& gathers) {
  if (!gathers.again.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<size_t> freed;
  for (size_t i = 0; i < gathers.all.size(); ++i) {
    if (!gathers.all[i].group || gathers.all[i].rows.storage().nbytes() != 0) continue;
    freed.push_back(i);
    gathers.step->count(static_cast<std::int64_t>(gathers.all[i].num_bytes));
  }
  start_messages(gathers.all, freed, [&](std::shared_ptr<Arrival> arrival, auto which) {
    gathers.again.emplace_back(std::move(arrival), std::move(which));
  });
}

// Writes through aliases with a version of their own: in autograd's eyes the saved tensors hold
// what they held.
void gather_again(raw::Gathers& gathers) {
  const at::NoGradGuard no_grad;
  start_again(gathers);
  for (auto& [arrival, which] : std::exchange(gathers.again, {}))
    for (size_t k = 0; k < which.size(); ++k) {
      const Gathered& g = gathers.all[which[k]];
      resize(g.rows, g.num_bytes);
      arrival->flat.take_whole(arrival->wait(), k, g.rows.variable_data());
    }
  std::vector<kernels::Cast> casts;
  for (const auto& g : gathers.all) {
    if (g.group || g.rows.storage().nbytes() != 0) continue;
    resize(g.rows, g.num_bytes);
    gathers.step->count(static_cast<std::int64_t>(g.num_bytes));
    if (g.quantized) {
      kernels::dequantize_into(g.rows.variable_data(), *g.quantized);
    } else {
      casts.push_back({g.rows.variable_data(), g.source});
    }
  }
  kernels::cast_all(casts);
}

at::Tensor empty_rows(const Gathered& g) {
  auto shape = g.part.shape;
  std::rotate(shape.begin(), shape.begin() + g.part.dim, shape.begin() + g.part.dim + 1);
  return at::empty(shape, g.source.options().dtype(g.compute));
}

// The result of a prefetch; undefined if there is none, or the value was written since.
at::Tensor take_pending(const Stored& w, const Gathered& g) {
  const auto step = gathering();
  if (!step) return {};
  const auto found = step->pending.find(key_of(w));
  if (found == step->pending.end()) return {};
  raw::Pending p = found->second;
  const at::Tensor message = p.arrival->wait();
  if (--found->second.num_takers == 0) {
    step->count(-static_cast<std::int64_t>(p.num_bytes));
    step->pending.erase(found);
  }
  if (p.version != static_cast<std::int64_t>(w.value._version())) return {};
  const at::Tensor rows = empty_rows(g);
  p.arrival->flat.take_whole(message, p.number, rows);
  return rows;
}

// The result of cast_ahead; undefined if there is none, or the value was written since.
at::Tensor take_cast(const Stored& w) {
  const auto step = gathering();
  if (!step) return {};
  const auto found = step->cast_ahead.extract(key_of(w));
  return found && found.mapped().version == static_cast<std::int64_t>(w.value._version())
             ? found.mapped().rows
             : at::Tensor();
}

// w as another micro-batch has gathered it, or as `make` gathers it; kept for the next one.
template <class F>
at::Tensor kept_or(const Stored& w, const F& make) {
  const auto step = gathering();
  if (!step || !step->kept.contains(key_of(w))) return make();
  at::Tensor& rows = step->kept[key_of(w)];
  if (!rows.defined()) rows = make();
  return rows;
}

// Known to the scope of the step, which frees it.
void put_into_scope(Gathered g) {
  const StepState* step = StepState::current();
  if (!step || !step->scope || !at::GradMode::is_enabled()) return;
  step->gathering->count(static_cast<std::int64_t>(g.num_bytes));
  step->scope->all.push_back(std::move(g));
}

}  // namespace

StepState::StepState(bool overlap)
    : gathering(std::make_shared<raw::Gathering>()),
      reductions(overlap ? raw::make_reductions() : nullptr),
      scope_(innermost, this) {}
StepState::StepState(StepState* whole)
    : float8_counts(whole->float8_counts),
      gathering(whole->gathering),
      reductions(whole->reductions),
      weights_later(whole->weights_later),
      scope_(innermost, this),
      is_whole_(false) {}
StepState::~StepState() {
  if (is_whole_)  // a graph may outlive the step
    gathering->pending.clear(), gathering->kept.clear(), gathering->cast_ahead.clear();
}

StepState* StepState::current() { return innermost; }

void StepState::leave_weights() { weights_later = std::make_shared<WeightsLater>(); }
WeightHalf StepState::take_weights() {
  return weights_later ? weights_later->take() : WeightHalf();
}
WeightsLater::AtOnce StepState::weights_at_once() const {
  return weights_later ? weights_later->at_once() : WeightsLater::AtOnce();
}
void StepState::finish_weights() {
  if (weights_later) weights_later->finish();
}

void StepState::keep_gathers() { gathering->keeps = true; }
GatherBytes StepState::bytes() const { return gathering->bytes; }
void StepState::reset_bytes() { gathering->bytes.most = gathering->bytes.now; }

ReshardScope::ReshardScope(std::shared_ptr<raw::Gathers> before)
    : gathers_(std::make_shared<raw::Gathers>()) {
  gathers_->before = std::move(before);
  gathers_->step = gathering();
  if (StepState* step = StepState::current()) outer_ = std::exchange(step->scope, gathers_);
}
ReshardScope::~ReshardScope() {
  if (StepState* step = StepState::current()) step->scope = outer_;
}

void raw::add_taker(Gathering& gathering) { ++gathering.num_takers; }
void raw::remove_taker(Gathering& gathering) {
  --gathering.num_takers;
  // Gathers that the others have started are for them.
  for (auto p = gathering.pending.begin(); p != gathering.pending.end();) {
    const auto next = std::next(p);
    if (--p->second.num_takers == 0) {
      gathering.count(-static_cast<std::int64_t>(p->second.num_bytes));
      gathering.pending.erase(p);
    }
    p = next;
  }
}

at::Tensor raw::enter_reshard(const at::Tensor& x, const std::shared_ptr<Gathers>& gathers) {
  return attach(x, x.detach(), [gathers](const at::Tensor& grad) {
    free(*gathers);
    return grad;
  });
}

at::Tensor raw::leave_reshard(const at::Tensor& y, const std::shared_ptr<Gathers>& gathers) {
  free(*gathers);
  return attach(y, y.detach(), [gathers](const at::Tensor& grad) {
    gather_again(*gathers);
    if (gathers->before) start_again(*gathers->before);
    return grad;
  });
}

void prefetch(const std::vector<const Stored*>& params) {
  const auto step = gathering();
  if (!step) return;
  const at::NoGradGuard no_grad;
  std::vector<const Stored*> wanted;
  std::vector<Gathered> all;
  std::vector<size_t> numbers;
  for (const auto* w : params) {
    const auto group = current_mesh().group(w->storage);
    if (group->size() == 1 || step->pending.contains(key_of(*w))) continue;
    numbers.push_back(all.size());
    wanted.push_back(w);
    all.push_back(gathered(*w, group));
    step->count(static_cast<std::int64_t>(all.back().num_bytes));
  }
  start_messages(all, numbers, [&](const std::shared_ptr<Arrival>& arrival, const auto& which) {
    for (size_t k = 0; k < which.size(); ++k) {
      const Stored& w = *wanted[which[k]];
      step->pending.emplace(
          key_of(w), raw::Pending{arrival, k, all[which[k]].num_bytes,
                                  static_cast<std::int64_t>(w.value._version()), step->num_takers});
    }
  });
}

void cast_ahead(const std::vector<const Stored*>& params) {
  const auto step = gathering();
  if (!step || step->num_takers > 1) return;
  const at::NoGradGuard no_grad;
  std::vector<kernels::Cast> casts;
  for (const auto* w : params) {
    if (current_mesh().group(w->storage)->size() > 1 || w->float8 || w->quantized || step->keeps ||
        step->cast_ahead.contains(key_of(*w)))
      continue;
    const at::Tensor source = source_of(*w);
    if (source.scalar_type() == w->spec.of_work() || source.numel() == 0) continue;
    const at::Tensor rows = at::empty(source.sizes(), source.options().dtype(w->spec.of_work()));
    step->cast_ahead.emplace(key_of(*w),
                             raw::CastAhead{rows, static_cast<std::int64_t>(w->value._version())});
    casts.push_back({rows, source});
  }
  kernels::cast_all(casts);
}

void keep_gathered(const std::vector<const Stored*>& params) {
  const auto step = gathering();
  if (!step || !step->keeps) return;
  for (const auto* w : params) step->kept.try_emplace(key_of(*w));
}

namespace raw {

at::Tensor gather_shards(const Stored& w, const std::shared_ptr<comm::Group>& group) {
  Gathered g = gathered(w, group);
  const auto dim = g.part.dim;
  g.rows = kept_or(w, [&] {
    const at::Tensor rows = take_pending(w, g);
    if (rows.defined()) return rows;
    return group->all_gather(own_numbers(g).movedim(dim, 0).contiguous(), w.storage_sizes);
  });
  const at::Tensor whole = g.rows.movedim(0, dim);
  put_into_scope(std::move(g));
  return whole;
}

at::Tensor cast_value(const Stored& w) {
  Gathered g = gathered(w, nullptr);
  if (g.source.scalar_type() == g.compute && !g.quantized) return g.source;
  g.rows = kept_or(w, [&] {
    const at::Tensor rows = take_cast(w);
    return rows.defined() ? rows : own_numbers(g);
  });
  const at::Tensor whole = g.rows;
  if (whole.numel() > 0) put_into_scope(std::move(g));
  return whole;
}

}  // namespace raw
}  // namespace moesh
