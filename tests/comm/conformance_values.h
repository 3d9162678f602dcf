#pragma once
// What the cases of the suite are written with.

#include <ATen/ATen.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "conformance.h"
#include "moesh/base/error.h"

namespace moesh::comm::conformance {

using Shape = std::vector<std::int64_t>;

constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16,
                                      at::kLong,   at::kInt,   at::kBool};

template <class... Vs>
void require(bool holds, const Vs&... vs) {
  if (!holds) throw Error(ErrorKind::internal, detail::concat(vs...));
}

// Element `index` of what rank `rank` holds. Sevenths are not binary fractions: a sum in another
// order has other bits.
inline double value(int rank, std::int64_t index, int salt) {
  return static_cast<double>((rank * 7919 + index * 104729 + salt * 1299709) % 1999 - 999) / 7.0;
}

// The tensor of a rank, on the host.
inline at::Tensor host(at::ScalarType dtype, const Shape& shape, int rank, int salt) {
  at::Tensor x = at::empty(shape, at::kDouble);
  auto* p = x.data_ptr<double>();
  for (std::int64_t i = 0; i < x.numel(); ++i) p[i] = value(rank, i, salt);
  if (dtype == at::kBool) return x.gt(0);
  return x.to(dtype);
}

// Shape, dtype and every bit.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.cpu().contiguous(), y = b.cpu().contiguous();
  if (x.scalar_type() != y.scalar_type() || x.sizes() != y.sizes()) return false;
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

inline void expect_equal(const at::Tensor& got, const at::Tensor& expected,
                         const std::string& what) {
  require(got.scalar_type() == expected.scalar_type(), what, ": dtype ", got.scalar_type(),
          " instead of ", expected.scalar_type());
  require(got.sizes() == expected.sizes(), what, ": shape ", got.sizes(), " instead of ",
          expected.sizes());
  if (same_bits(got, expected)) return;
  require(got.numel() < 1000, what, ": other bits");
  throw Error(ErrorKind::internal, detail::concat(what, ": got\n", got, "\nexpected\n", expected));
}

inline void expect_error(const std::function<void()>& f, const std::vector<std::string>& texts) {
  std::string got = "nothing was thrown";
  try {
    f();
  } catch (const Error& e) {
    got = e.what();
    require(e.kind() == ErrorKind::comm, "kind ", to_string(e.kind()), ": ", got);
  }
  for (const auto& text : texts)
    require(got.find(text) != std::string::npos, "'", text, "' is not in: ", got);
}

}  // namespace moesh::comm::conformance
