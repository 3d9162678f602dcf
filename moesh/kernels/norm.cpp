#include "moesh/kernels/norm.h"

#include <ATen/core/grad_mode.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace {

void check_norm(const at::Tensor& x, const at::Tensor& weight_D) {
  MOESH_CHECK(x.defined() && x.dim() >= 1 && is_kernel_dtype(x.scalar_type()), ErrorKind::data,
              "x is ", describe(x), "; a norm takes float64, float32 or bfloat16 [.., features]");
  if (!weight_D.defined()) return;
  check_tensor("weight_D", weight_D, x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat, 1);
  check_same_device("weight_D", weight_D, "x", x);
  MOESH_CHECK(weight_D.size(0) == x.size(-1), ErrorKind::data, "weight_D is ", describe(weight_D),
              "; a norm of ", x.size(-1), " features has as many weights");
}

at::Tensor plain(const at::Tensor& weight_D) {
  return weight_D.defined() ? weight_D.contiguous() : weight_D;
}

}  // namespace

NormOutput norm_forward(const at::Tensor& x, const at::Tensor& weight_D, double eps) {
  check_norm(x, weight_D);
  const at::NoGradGuard no_grad;
  return kernels_for(x.device()).norm_forward(x, plain(weight_D), eps);
}

NormGradients norm_backward(const at::Tensor& x, const at::Tensor& weight_D, const at::Tensor& r,
                            const at::Tensor& dy) {
  check_norm(x, weight_D);
  MOESH_CHECK(r.defined() && r.sizes() == x.sizes().slice(0, static_cast<size_t>(x.dim() - 1)),
              ErrorKind::data, "r is ", describe(r), " for x ", describe(x),
              "; pass what norm_forward gave");
  MOESH_CHECK(dy.defined() && dy.sizes() == x.sizes() && dy.scalar_type() == x.scalar_type() &&
                  dy.device() == x.device(),
              ErrorKind::data, "dy is ", describe(dy), "; y was ", describe(x));
  const at::NoGradGuard no_grad;
  return kernels_for(x.device()).norm_backward(x, plain(weight_D), r.contiguous(), dy);
}

}  // namespace moesh::kernels
