#include "moesh/kernels/rope.h"

#include <ATen/core/grad_mode.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace {

void check_rotation(const Rotation& r, const at::Tensor& x) {
  MOESH_CHECK(x.defined() && x.dim() == 4 && is_kernel_dtype(x.scalar_type()), ErrorKind::data,
              "x is ", describe(x),
              "; heads are float64, float32 or bfloat16 [batch, positions, heads, features]");
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  check_tensor("cos_Lf", r.cos_Lf, wide, 2);
  check_tensor("sin_Lf", r.sin_Lf, wide, 2);
  check_same_device("cos_Lf", r.cos_Lf, "x", x);
  MOESH_CHECK(r.cos_Lf.sizes() == r.sin_Lf.sizes() && r.cos_Lf.size(0) == x.size(1) &&
                  2 * r.cos_Lf.size(1) <= x.size(3) && r.cos_Lf.is_contiguous() &&
                  r.sin_Lf.is_contiguous(),
              ErrorKind::data, "cos is ", describe(r.cos_Lf), " and sin ", describe(r.sin_Lf),
              " for heads ", describe(x),
              "; both have a line for each position and at most a number for each two features");
}

}  // namespace

at::Tensor rotate_forward(const Rotation& rotation, const at::Tensor& x_BLhd) {
  check_rotation(rotation, x_BLhd);
  const at::NoGradGuard no_grad;
  return kernels_for(x_BLhd.device()).rotate_forward(rotation, x_BLhd);
}

at::Tensor rotate_backward(const Rotation& rotation, const at::Tensor& dy_BLhd) {
  check_rotation(rotation, dy_BLhd);
  const at::NoGradGuard no_grad;
  return kernels_for(dy_BLhd.device()).rotate_backward(rotation, dy_BLhd);
}

}  // namespace moesh::kernels
