#include "moesh/kernels/rows.h"

#include <ATen/core/grad_mode.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index_R) {
  MOESH_CHECK(x.defined() && (x.dim() == 1 || x.dim() == 2), ErrorKind::data, "x is ", describe(x),
              "; pass [rows] or [rows, columns]");
  check_tensor("index_R", index_R, at::kInt, 1);
  check_same_device("index_R", index_R, "x", x);
  const at::NoGradGuard no_grad;
  return kernels_for(x.device()).gather_rows(x.contiguous(), index_R.contiguous());
}

at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK) {
  MOESH_CHECK(rows_RD.defined() && (rows_RD.dim() == 1 || rows_RD.dim() == 2) &&
                  is_kernel_dtype(rows_RD.scalar_type()),
              ErrorKind::data, "rows_RD is ", describe(rows_RD),
              "; pass float64, float32 or bfloat16 of 1 or 2 dimensions");
  check_tensor("inverse_TK", inverse_TK, at::kInt, 2);
  check_same_device("inverse_TK", inverse_TK, "rows_RD", rows_RD);
  const at::NoGradGuard no_grad;
  return kernels_for(rows_RD.device()).combine_rows(rows_RD.contiguous(), inverse_TK.contiguous());
}

}  // namespace moesh::kernels
