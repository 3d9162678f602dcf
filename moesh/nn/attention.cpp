#include "moesh/nn/attention.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "moesh/nn/composed_attention.h"
#include "moesh/nn/fused_attention.h"
#include "moesh/spmd/map.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"

namespace moesh::nn {
namespace {

// `sinks_h` may be undefined.
at::Tensor attend_plain(const at::Tensor& q_BLhd, const at::Tensor& k_BSgd,
                        const at::Tensor& v_BSgd, const at::Tensor& sinks_h, const Tokens& tokens,
                        const AttentionOptions& o) {
  const kernels::AttentionConfig config{
      .scale = o.scale, .start = tokens.span_start(), .window = o.window, .chunk = o.chunk};
  const kernels::AttentionInput input{q_BLhd, k_BSgd, v_BSgd, sinks_h};
  return kernels::has_attention(q_BLhd.device()) ? fused_attention(config, input)
                                                 : composed_attention(config, input);
}

}  // namespace

Heads split_heads(const Tensor<Dense{Place::T, Place::T, Place::F}>& x, std::int64_t width) {
  return unflatten(x, -1, {local(x).size(-1) / width, width});
}

Tensor<Dense{Place::T, Place::T, Place::F}> merge_heads(const Heads& x) { return flatten(x, 2, 3); }

AllHeads all_positions(const Heads& x, const Tokens& tokens) {
  return all_gather<cp>(x, tokens.over_cp());
}

double mean_visible(std::int64_t sequence, const AttentionOptions& o) {
  double sum = 0;
  for (std::int64_t i = 0; i < sequence; ++i) {
    std::int64_t seen = i + 1;
    if (o.window > 0) seen = std::min(seen, o.window);
    if (o.chunk > 0) seen = std::min(seen, i % o.chunk + 1);
    sum += static_cast<double>(seen);
  }
  return sum / static_cast<double>(std::max<std::int64_t>(1, sequence));
}

Heads attend(const Heads& q, const AllHeads& k, const AllHeads& v, const Tokens& tokens,
             const AttentionOptions& options) {
  return map_heads(
      [&](const at::Tensor& q_BLhd, const at::Tensor& k_BSgd, const at::Tensor& v_BSgd) {
        return attend_plain(q_BLhd, k_BSgd, v_BSgd, {}, tokens, options);
      },
      q, k, v);
}

Heads attend(const Heads& q, const AllHeads& k, const AllHeads& v, const PerHead& sinks,
             const Tokens& tokens, const AttentionOptions& options) {
  return map_heads(
      [&](const at::Tensor& q_BLhd, const at::Tensor& k_BSgd, const at::Tensor& v_BSgd,
          const at::Tensor& sinks_h) {
        return attend_plain(q_BLhd, k_BSgd, v_BSgd, sinks_h, tokens, options);
      },
      q, k, v, sinks);
}

}  // namespace moesh::nn
