#include "moesh/nn/latent.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/einsum.h>

#include "moesh/kernels/rowwise.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/ops.h"

namespace moesh::nn {
std::pair<Heads, Heads> latent_heads(const Heads& kv, const Full& key, std::int64_t num_own) {
  raw::Tensors parts;
  const auto make = [&](const at::Tensor& heads, const at::Tensor& shared) {
    parts = raw::differentiable({heads, shared}, [&]() -> raw::Differentiable {
      const auto y = kernels::latent_heads_forward(heads, shared, num_own);
      return {{y.k_BLhd, y.v_BLhv}, {}, [num_own](const auto&, const auto& dy) {
                const auto d = kernels::latent_heads_backward(dy[0], dy[1], num_own);
                return raw::Tensors{d.kv, d.key};
              }};
    });
  };
  const auto part = [&](std::size_t i) {
    return map_heads(
        [&](const at::Tensor& heads, const at::Tensor& shared) {
          if (parts.empty()) make(heads, shared);
          return parts[i];
        },
        kv, key);
  };
  Heads k = part(0);
  return {std::move(k), part(1)};
}

// score = <q, W_k latent> = <W_k' q, latent>, and sum p W_v latent = W_v sum p latent.
// c latent, n num_own
Heads attend_latents(const Heads& q, const Full& latents,
                     const Tensor<Dense{Place::R, Place::R, Place::F}>& weight,
                     std::int64_t num_own, const Tokens& tokens, const AttentionOptions& options,
                     const KvCache& kv_cache) {
  const std::int64_t width = local(weight).size(1);
  const auto of_heads = [&](const at::Tensor& w, std::int64_t num_heads) {
    return w.reshape({num_heads, -1, width});
  };
  const Heads queries = map_heads(
      [&](const at::Tensor& q_BLhd, const at::Tensor& w) {
        const at::Tensor w_hnc = of_heads(w, q_BLhd.size(2)).narrow(1, 0, num_own);
        const at::Tensor own = q_BLhd.narrow(3, 0, num_own);
        return at::cat({at::einsum("blhn,hnc->blhc", {own, w_hnc}),
                        q_BLhd.narrow(3, num_own, q_BLhd.size(3) - num_own)},
                       3);
      },
      q, weight);
  const Heads y = attend(queries, latents, narrow(latents, 2, 0, width), tokens, options, kv_cache);
  return map_heads(
      [&](const at::Tensor& y_BLhc, const at::Tensor& w) {
        const at::Tensor all = of_heads(w, y_BLhc.size(2));
        return at::einsum("blhc,hvc->blhv",
                          {y_BLhc, all.narrow(1, num_own, all.size(1) - num_own)});
      },
      y, weight);
}

}  // namespace moesh::nn
