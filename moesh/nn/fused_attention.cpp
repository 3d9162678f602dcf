#include "moesh/fsdp/recompute.h"
#include "moesh/nn/attention_functions.h"
#include "moesh/spmd/attach.h"

namespace moesh::nn {

at::Tensor fused_attention(const kernels::AttentionConfig& config,
                           const kernels::AttentionInput& in) {
  const auto forward = [&]() -> kernels::AttentionOutput {
    if (const auto first = raw::recall("attention")) return {(*first)[0], (*first)[1]};
    auto out = kernels::attention_forward(config, in);
    raw::keep("attention", {out.y_BLhv, out.lse_BhL});
    return out;
  };
  return raw::differentiable(
      {in.q_BLhd, in.k_BSgd, in.v_BSgv, in.sinks_h}, [&]() -> raw::Differentiable {
        const auto out = forward();
        return {
            {out.y_BLhv},
            {in.q_BLhd, in.k_BSgd, in.v_BSgv, in.sinks_h, in.starts_BL, out.y_BLhv, out.lse_BhL},
            [config](const auto& s, const auto& dy) {
              const auto d = kernels::attention_backward(config, {s[0], s[1], s[2], s[3], s[4]},
                                                         {s[5], s[6]}, dy[0]);
              return raw::Tensors{d.q_BLhd, d.k_BSgd, d.v_BSgv, d.sinks_h};
            }};
      })[0];
}

}  // namespace moesh::nn
