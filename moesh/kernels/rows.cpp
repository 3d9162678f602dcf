#include "moesh/kernels/rows.h"

#include <ATen/core/grad_mode.h>

#include "moesh/kernels/aten/aten.h"
#include "moesh/kernels/check.h"
#include "moesh/kernels/cpu/cpu.h"
#include "moesh/kernels/meta/meta.h"

namespace moesh::kernels {

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index_R) {
  MOESH_CHECK(x.defined() && (x.dim() == 1 || x.dim() == 2), ErrorKind::data, "x is ", describe(x),
              "; pass [rows] or [rows, columns]");
  check_tensor("index_R", index_R, at::kLong, 1);
  check_same_device("index_R", index_R, "x", x);
  const at::NoGradGuard no_grad;
  if (x.is_meta()) return meta::gather_rows(x.contiguous(), index_R);
  return x.is_cpu() ? cpu::gather_rows(x.contiguous(), index_R.contiguous())
                    : aten::gather_rows(x.contiguous(), index_R.contiguous());
}

at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK) {
  MOESH_CHECK(rows_RD.defined() && (rows_RD.dim() == 1 || rows_RD.dim() == 2) &&
                  is_kernel_dtype(rows_RD.scalar_type()),
              ErrorKind::data, "rows_RD is ", describe(rows_RD),
              "; pass float64, float32 or bfloat16 of 1 or 2 dimensions");
  check_tensor("inverse_TK", inverse_TK, at::kLong, 2);
  check_same_device("inverse_TK", inverse_TK, "rows_RD", rows_RD);
  const at::NoGradGuard no_grad;
  const at::Tensor rows = rows_RD.contiguous(), inverse = inverse_TK.contiguous();
  if (rows.is_meta()) return meta::combine_rows(rows, inverse);
  return rows.is_cpu() ? cpu::combine_rows(rows, inverse) : aten::combine_rows(rows, inverse);
}

}  // namespace moesh::kernels
