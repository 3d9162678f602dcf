#include "moesh/spmd/reshard.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/kernels/update.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/flat.h"
#include "moesh/spmd/forget_prefetched.h"
#include "moesh/spmd/kept_gathers.h"

namespace moesh {

struct KeptGathers::Map {
  std::map<const void*, at::Tensor> rows;  // by the value
};

namespace raw {

// One parameter to be gathered, or cast: what this rank has of it, and how the ranks divide it.
struct Gathered {
  at::Tensor source;  // in the dtype of the master weights, or of the work
  at::ScalarType compute;
  std::shared_ptr<comm::Group> group;  // null: cast alone
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

struct Gathers {
  std::vector<Gathered> all;
  std::shared_ptr<Gathers> before;  // of the block before this one, whose backward comes after
  // Under way for backward: the messages, and which of `all` are in each.
  std::vector<std::pair<std::shared_ptr<Arrival>, std::vector<size_t>>> again;
};

}  // namespace raw

namespace {

using raw::Arrival;
using raw::Gathered;

thread_local std::shared_ptr<raw::Gathers> current_gathers;
thread_local KeptGathers::Map* kept_gathers = nullptr;
thread_local bool takes_kept = false;
thread_local GatherBytes bytes;

void count_gathered(std::int64_t change) {
  bytes.now += change;
  bytes.most = std::max(bytes.most, bytes.now);
}

void resize(const at::Tensor& t, size_t num_bytes) {
  auto* storage = t.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(storage->allocator()->allocate(num_bytes));
  storage->set_nbytes(num_bytes);
}

void free(raw::Gathers& gathers) {
  for (auto& g : gathers.all) {
    if (g.rows.storage().nbytes() == 0) continue;
    resize(g.rows, 0);
    count_gathered(-static_cast<std::int64_t>(g.num_bytes));
  }
}

// What is cast and gathered: the copy in the type of the work, where there is one.
at::Tensor source_of(const Stored& w) {
  const at::Tensor copy = raw::current_copy(w);
  return copy.defined() ? copy : w.value.detach();
}

Gathered gathered(const Stored& w, const std::shared_ptr<comm::Group>& group) {
  const auto compute = w.spec.compute.value_or(w.spec.dtype);
  std::int64_t numel = 1;
  for (auto n : w.compute.length) numel *= n;
  return {.source = source_of(w),
          .compute = compute,
          .group = group,
          .part = {w.compute.length, w.spec.storage_dim, w.storage_sizes},
          .num_bytes = static_cast<size_t>(numel) * c10::elementSize(compute)};
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
    for (size_t k = 0; k < together.size(); ++k)
      flat.put_part(mine, k, all[together[k]].source, rank);
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
    count_gathered(static_cast<std::int64_t>(gathers.all[i].num_bytes));
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
  for (const auto& g : gathers.all) {
    if (g.group || g.rows.storage().nbytes() != 0) continue;
    resize(g.rows, g.num_bytes);
    count_gathered(static_cast<std::int64_t>(g.num_bytes));
    kernels::cast_into(g.rows.variable_data(), g.source);
  }
}

struct Pending {
  std::shared_ptr<Arrival> arrival;
  size_t number;  // in the message
  size_t num_bytes;
  std::int64_t version;  // of the value: an update in between makes the gather stale
};

std::map<const void*, Pending>& pending() {
  thread_local std::map<const void*, Pending> gathers;
  return gathers;
}

at::Tensor empty_rows(const Gathered& g) {
  auto shape = g.part.shape;
  std::rotate(shape.begin(), shape.begin() + g.part.dim, shape.begin() + g.part.dim + 1);
  return at::empty(shape, g.source.options().dtype(g.compute));
}

// Of a prefetch; undefined where there is none, or the value was written since.
at::Tensor take_pending(const Stored& w, const Gathered& g) {
  const auto found = pending().find(w.value.unsafeGetTensorImpl());
  if (found == pending().end()) return {};
  const Pending p = found->second;
  pending().erase(found);
  count_gathered(-static_cast<std::int64_t>(p.num_bytes));
  const at::Tensor message = p.arrival->wait();
  if (p.version != static_cast<std::int64_t>(w.value._version())) return {};
  const at::Tensor rows = empty_rows(g);
  p.arrival->flat.take_whole(message, p.number, rows);
  return rows;
}

// What another micro-batch has gathered of w, or what `make` gathers, which is kept for the next.
template <class F>
at::Tensor kept_or(const Stored& w, const F& make) {
  if (!takes_kept || !kept_gathers) return make();
  at::Tensor& rows = kept_gathers->rows[w.value.unsafeGetTensorImpl()];
  if (!rows.defined()) rows = make();
  return rows;
}

}  // namespace

KeptGathers::KeptGathers(bool on) : outer_(kept_gathers) {
  if (on) map_ = std::make_unique<Map>();
  kept_gathers = map_.get();
}
KeptGathers::~KeptGathers() { kept_gathers = outer_; }

TakeKept::TakeKept() : outer_(std::exchange(takes_kept, true)) {}
TakeKept::~TakeKept() { takes_kept = outer_; }

ReshardScope::ReshardScope(std::shared_ptr<raw::Gathers> before)
    : gathers_(std::make_shared<raw::Gathers>()), outer_(current_gathers) {
  gathers_->before = std::move(before);
  current_gathers = gathers_;
}
ReshardScope::~ReshardScope() { current_gathers = outer_; }

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
  const at::NoGradGuard no_grad;
  std::vector<const Stored*> wanted;
  std::vector<Gathered> all;
  std::vector<size_t> numbers;
  for (const auto* w : params) {
    const auto group = current_mesh().group(w->storage);
    if (group->size() == 1 || pending().contains(w->value.unsafeGetTensorImpl())) continue;
    numbers.push_back(all.size());
    wanted.push_back(w);
    all.push_back(gathered(*w, group));
    count_gathered(static_cast<std::int64_t>(all.back().num_bytes));
  }
  start_messages(all, numbers, [&](const std::shared_ptr<Arrival>& arrival, const auto& which) {
    for (size_t k = 0; k < which.size(); ++k) {
      const at::Tensor& value = wanted[which[k]]->value;
      pending().emplace(value.unsafeGetTensorImpl(),
                        Pending{arrival, k, all[which[k]].num_bytes,
                                static_cast<std::int64_t>(value._version())});
    }
  });
}

ForgetPrefetched::ForgetPrefetched() : num_exceptions_(std::uncaught_exceptions()) {}
ForgetPrefetched::~ForgetPrefetched() {
  if (std::uncaught_exceptions() == num_exceptions_) return;
  for (const auto& [value, p] : pending()) count_gathered(-static_cast<std::int64_t>(p.num_bytes));
  pending().clear();
}

GatherBytes gather_bytes() { return bytes; }
void reset_gather_bytes() { bytes.most = bytes.now; }

namespace raw {

at::Tensor gather_shards(const Stored& w, const std::shared_ptr<comm::Group>& group) {
  Gathered g = gathered(w, group);
  const auto dim = g.part.dim;
  g.rows = kept_or(w, [&] {
    const at::Tensor rows = take_pending(w, g);
    if (rows.defined()) return rows;
    return group->all_gather(kernels::cast(g.source, g.compute).movedim(dim, 0).contiguous(),
                             w.storage_sizes);
  });
  const at::Tensor whole = g.rows.movedim(0, dim);
  if (current_gathers && at::GradMode::is_enabled()) {
    count_gathered(static_cast<std::int64_t>(g.num_bytes));
    current_gathers->all.push_back(std::move(g));
  }
  return whole;
}

at::Tensor cast_value(const Stored& w) {
  Gathered g = gathered(w, nullptr);
  if (g.source.scalar_type() == g.compute) return g.source;
  g.rows = kept_or(w, [&] { return kernels::cast(g.source, g.compute); });
  const at::Tensor whole = g.rows;
  if (current_gathers && at::GradMode::is_enabled() && g.rows.numel() > 0) {
    count_gathered(static_cast<std::int64_t>(g.num_bytes));
    current_gathers->all.push_back(std::move(g));
  }
  return whole;
}

}  // namespace raw
}  // namespace moesh
