#include "moesh/spmd/reshard.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <map>

#include "moesh/base/error.h"
#include "moesh/kernels/cast.h"
#include "moesh/spmd/attach.h"

namespace moesh {
namespace raw {

// One parameter that was gathered, or cast: where it came from, and the storage that autograd's
// saved tensors use.
struct Gathered {
  at::Tensor shard;  // in the dtype of the gather's source: the leaf's own memory
  at::ScalarType compute;
  std::shared_ptr<comm::Group> group;  // null: cast alone
  std::int64_t dim;
  std::vector<std::int64_t> sizes;
  at::Tensor rows;  // [whole along dim first, ..], contiguous
  size_t num_bytes;
};

struct Gathers {
  std::vector<Gathered> all;
};

}  // namespace raw

namespace {

using raw::Gathered;

thread_local std::shared_ptr<raw::Gathers> current_gathers;
thread_local GatherBytes bytes;

void count(std::int64_t change) {
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
    count(-static_cast<std::int64_t>(g.num_bytes));
  }
}

at::Tensor shard_rows(const at::Tensor& value, at::ScalarType compute, std::int64_t dim) {
  return kernels::cast(value.detach(), compute).movedim(dim, 0).contiguous();
}

void gather_again(raw::Gathers& gathers) {
  const at::NoGradGuard no_grad;
  for (auto& g : gathers.all) {
    if (g.rows.storage().nbytes() != 0) continue;
    at::Tensor rows;
    if (g.group) rows = g.group->all_gather(shard_rows(g.shard, g.compute, g.dim), g.sizes);
    resize(g.rows, g.num_bytes);
    count(static_cast<std::int64_t>(g.num_bytes));
    // Written through an alias with a version of its own: in autograd's eyes the saved tensors hold
    // what they held.
    if (g.group)
      at::Tensor(g.rows.variable_data()).copy_(rows);
    else
      kernels::cast_into(g.rows.variable_data(), g.shard);
  }
}

struct Pending {
  comm::Handle handle;
  size_t num_bytes;
  std::int64_t version;  // of the value: an update in between makes the gather stale
};

std::map<const void*, Pending>& pending() {
  thread_local std::map<const void*, Pending> gathers;
  return gathers;
}

}  // namespace

ReshardScope::ReshardScope() : gathers_(std::make_shared<raw::Gathers>()), outer_(current_gathers) {
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
    return grad;
  });
}

void prefetch(const std::vector<const Stored*>& params) {
  const at::NoGradGuard no_grad;
  for (const auto* w : params) {
    const auto group = current_mesh().group(w->storage);
    if (group->size() == 1 || pending().contains(w->value.unsafeGetTensorImpl())) continue;
    const auto compute = w->spec.compute.value_or(w->spec.dtype);
    std::int64_t numel = 1;
    for (auto n : w->compute.length) numel *= n;
    const auto num_bytes = static_cast<size_t>(numel) * c10::elementSize(compute);
    auto handle = group->start_all_gather(shard_rows(w->value, compute, w->spec.storage_dim),
                                          w->storage_sizes);
    count(static_cast<std::int64_t>(num_bytes));
    pending().emplace(w->value.unsafeGetTensorImpl(),
                      Pending{std::move(handle), num_bytes, w->value._version()});
  }
}

GatherBytes gather_bytes() { return bytes; }
void reset_gather_bytes() { bytes.most = bytes.now; }

namespace raw {

at::Tensor gather_shards(const Stored& w, at::ScalarType compute,
                         const std::shared_ptr<comm::Group>& group) {
  const auto dim = w.spec.storage_dim;
  at::Tensor rows;
  const auto found = pending().find(w.value.unsafeGetTensorImpl());
  if (found != pending().end()) {
    rows = found->second.handle.wait();
    if (found->second.version != w.value._version()) rows.reset();
    count(-static_cast<std::int64_t>(found->second.num_bytes));
    pending().erase(found);
  }
  if (!rows.defined()) {
    rows = group->all_gather(shard_rows(w.value, compute, dim), w.storage_sizes);
  }
  if (current_gathers && at::GradMode::is_enabled()) {
    current_gathers->all.push_back(
        {w.value.detach(), compute, group, dim, w.storage_sizes, rows, rows.storage().nbytes()});
    count(static_cast<std::int64_t>(rows.storage().nbytes()));
  }
  return rows.movedim(0, dim);
}

at::Tensor cast_value(const Stored& w, at::ScalarType compute) {
  const at::Tensor value = w.value.detach();
  if (value.scalar_type() == compute) return value;
  if (const at::Tensor copy = current_copy(w); copy.defined()) return copy;
  const at::Tensor rows = kernels::cast(value, compute);
  if (current_gathers && at::GradMode::is_enabled() && rows.numel() > 0) {
    const auto num_bytes = rows.storage().nbytes();
    current_gathers->all.push_back({value, compute, nullptr, 0, {}, rows, num_bytes});
    count(static_cast<std::int64_t>(num_bytes));
  }
  return rows;
}

}  // namespace raw
}  // namespace moesh
