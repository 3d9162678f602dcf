#pragma once
// Checks and questions that several kernels need.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <vector>

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

/// [e + 1] first row of each expert and the end of the last, from ends_e on the host. Every access
/// to rows rests on it, so it is checked here, where the values can be read without a wait.
inline std::vector<std::int64_t> first_rows(const at::Tensor& ends_e, std::int64_t num_rows) {
  const auto* ends = ends_e.const_data_ptr<std::int32_t>();
  std::vector<std::int64_t> first(1, 0);
  for (std::int64_t e = 0; e < ends_e.numel(); ++e) {
    MOESH_CHECK(ends[e] >= first.back(), ErrorKind::data, "ends_e[", e, "] is ", ends[e], " after ",
                first.back(), "; the rows of experts follow one another");
    first.push_back(ends[e]);
  }
  MOESH_CHECK(first.back() == num_rows, ErrorKind::data, "ends_e ends at ", first.back(),
              ", but there are ", num_rows, " rows");
  return first;
}

/// Without gaps; undefined stays so.
inline at::Tensor plain(const at::Tensor& t) { return t.defined() ? t.contiguous() : t; }

/// Memory of its sizes and type, without gaps; undefined stays so.
inline at::Tensor fresh(const at::Tensor& t) {
  return t.defined() ? at::empty(t.sizes(), t.options()) : t;
}

/// The dtype in which sums are taken: float64 stays, all others become float32.
inline at::ScalarType wide(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline bool is_kernel_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16;
}

}  // namespace moesh::kernels
