#pragma once
// The dtype in which sums are taken: float64 stays, all others become float32.

#include <ATen/core/Tensor.h>

namespace moesh::kernels::aten {

inline at::ScalarType wide(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace moesh::kernels::aten
