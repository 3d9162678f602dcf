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
  check_tensor("cos_Pf", r.cos_Pf, wide, 2);
  check_tensor("sin_Pf", r.sin_Pf, wide, 2);
  check_same_device("cos_Pf", r.cos_Pf, "x", x);
  if (r.positions_BL.defined()) {
    check_tensor("positions_BL", r.positions_BL, at::kLong, 2);
    check_same_device("positions_BL", r.positions_BL, "x", x);
    MOESH_CHECK(r.positions_BL.sizes() == x.sizes().slice(0, 2) && r.positions_BL.is_contiguous(),
                ErrorKind::data, "positions are ", describe(r.positions_BL), " for heads ",
                describe(x), "; they are contiguous, one for each token");
  }
  MOESH_CHECK(r.cos_Pf.sizes() == r.sin_Pf.sizes() &&
                  (r.positions_BL.defined() || r.cos_Pf.size(0) == x.size(1)) &&
                  2 * r.cos_Pf.size(1) <= x.size(3) && r.cos_Pf.is_contiguous() &&
                  r.sin_Pf.is_contiguous(),
              ErrorKind::data, "cos is ", describe(r.cos_Pf), " and sin ", describe(r.sin_Pf),
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
