#include "moesh/nn/norm.h"

#include <ATen/ATen.h>

namespace moesh::nn::raw {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& w, double eps) {
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor y = x.to(wide);
  return (y * at::rsqrt(y.square().mean({-1}, /*keepdim=*/true) + eps) * w.to(wide)).to(x.scalar_type());
}

}  // namespace moesh::nn::raw
