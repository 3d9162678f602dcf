#include <ATen/ops/cat.h>
#include <ATen/ops/sum.h>

#include "moesh/kernels/table.h"

namespace moesh::kernels::aten {

LatentHeads latent_heads_forward(const at::Tensor& kv, const at::Tensor& key,
                                 std::int64_t num_own) {
  const at::Tensor shared = key.unsqueeze(2).expand({-1, -1, kv.size(2), -1});
  return {at::cat({kv.narrow(3, 0, num_own), shared}, 3),
          kv.narrow(3, num_own, kv.size(3) - num_own).contiguous()};
}

LatentGradients latent_heads_backward(const at::Tensor& dk, const at::Tensor& dv,
                                      std::int64_t num_own) {
  const auto wide = dk.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {at::cat({dk.narrow(3, 0, num_own), dv}, 3),
          at::sum(dk.narrow(3, num_own, dk.size(3) - num_own), {2}, /*keepdim=*/false, wide)
              .to(dk.scalar_type())};
}

}  // namespace moesh::kernels::aten
