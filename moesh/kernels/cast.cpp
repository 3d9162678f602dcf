#include "moesh/kernels/cast.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {

void cast_into(const at::Tensor& to, const at::Tensor& from) {
  MOESH_CHECK(to.defined() && from.defined() && to.sizes() == from.sizes() &&
                  to.device() == from.device() && to.is_contiguous(),
              ErrorKind::data, "a cast of ", describe(from), " into ", describe(to),
              "; pass contiguous memory of one shape and device");
  const at::NoGradGuard no_grad;
  kernels_for(to.device()).cast_into(to, from.contiguous());
}

at::Tensor cast(const at::Tensor& x, at::ScalarType dtype) {
  if (x.scalar_type() == dtype) return x;
  const at::Tensor out = at::empty(x.sizes(), x.options().dtype(dtype));
  cast_into(out, x);
  return out;
}

}  // namespace moesh::kernels
