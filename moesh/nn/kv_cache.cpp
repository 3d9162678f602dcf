#include "moesh/nn/kv_cache.h"

#include <algorithm>

#include "moesh/spmd/ops.h"

namespace moesh::nn {
namespace {

template <auto L>
Tensor<L> joined(const Tensor<L>& kept, const Tensor<L>& x) {
  return local(kept).defined() ? cat<L>({kept, x}, 1) : x;
}

template <auto L>
Tensor<L> without_first(const Tensor<L>& kept, std::int64_t n) {
  return local(kept).defined() ? narrow(kept, 1, n, local(kept).size(1) - n) : kept;
}

}  // namespace

const KvCache::KeysAndValues& KvCache::add(const Heads& keys, const Heads& values) {
  heads_ = {joined(heads_.keys_BSgd, keys), joined(heads_.values_BSgd, values)};
  end_ += local(keys).size(1);
  return heads_;
}

const Full& KvCache::add(const Full& latents) {
  latents_ = joined(latents_, latents);
  end_ += local(latents).size(1);
  return latents_;
}

void KvCache::forget(const AttentionOptions& o) {
  // The next token is at end_.
  std::int64_t needed = o.window > 0 ? end_ - o.window + 1 : 0;
  if (o.chunk > 0) needed = std::max(needed, end_ / o.chunk * o.chunk) / o.chunk * o.chunk;
  const std::int64_t n = needed - begin_;
  if (n <= 0) return;
  heads_ = {without_first(heads_.keys_BSgd, n), without_first(heads_.values_BSgd, n)};
  latents_ = without_first(latents_, n);
  begin_ = needed;
}

}  // namespace moesh::nn
