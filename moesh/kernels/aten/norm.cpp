#include <ATen/TensorOperators.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/square.h>

#include <numeric>

#include "moesh/kernels/table.h"

namespace moesh::kernels::aten {
namespace {

at::ScalarType wide(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace

NormOutput norm_forward(const at::Tensor& x, const at::Tensor& weight_D, double eps) {
  const at::Tensor v = x.to(wide(x));
  const at::Tensor r = at::mean(at::square(v), {-1}).add_(eps).rsqrt_();
  at::Tensor y = v * r.unsqueeze(-1);
  if (weight_D.defined()) y.mul_(weight_D);
  return {y.to(x.scalar_type()), r};
}

NormGradients norm_backward(const at::Tensor& x, const at::Tensor& weight_D, const at::Tensor& r,
                            const at::Tensor& dy) {
  const at::Tensor scale = r.unsqueeze(-1), normal = x.to(wide(x)) * scale;
  at::Tensor d = dy.to(wide(x));
  NormGradients out;
  if (weight_D.defined()) {
    std::vector<std::int64_t> rows(static_cast<size_t>(x.dim() - 1));
    std::iota(rows.begin(), rows.end(), 0);
    const at::Tensor terms = d * normal;
    out.weight_D = rows.empty() ? terms : terms.sum(rows);
    d = d * weight_D;
  }
  const at::Tensor along = at::mean(d * normal, {-1}, /*keepdim=*/true);
  out.x = (d - normal * along).mul_(scale).to(x.scalar_type());
  return out;
}

}  // namespace moesh::kernels::aten
