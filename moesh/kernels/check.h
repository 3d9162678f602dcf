#pragma once
// Checks that several kernels share.

#include <ATen/core/Tensor.h>

#include "moesh/base/error.h"

namespace moesh::kernels {

inline std::string describe(const at::Tensor& t) {
  if (!t.defined()) return "undefined";
  return detail::concat(c10::toString(t.scalar_type()), " ", t.sizes(), " on ", t.device());
}

/// Checks dtype and number of dimensions.
inline void check_tensor(const char* name, const at::Tensor& t, at::ScalarType dtype,
                         std::int64_t num_dims) {
  MOESH_CHECK(t.defined() && t.scalar_type() == dtype && t.dim() == num_dims, ErrorKind::data, name,
              " is ", describe(t), "; pass a ", c10::toString(dtype), " tensor of ", num_dims,
              " dimensions");
}

inline void check_same_device(const char* name, const at::Tensor& t, const char* other_name,
                              const at::Tensor& other) {
  MOESH_CHECK(t.device() == other.device(), ErrorKind::data, name, " is on ", t.device(), " and ",
              other_name, " on ", other.device(), "; move one of them");
}

inline bool is_kernel_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16;
}

}  // namespace moesh::kernels
