#pragma once
// Functions of rows, written on plain tensors: each rank calls them on the rows that it holds. The
// mixing table gives the layout of the result, and what it refuses does not compile. That no row
// comes or goes is checked at run time; that f looks at one row at a time is its author's promise.

#include <functional>

#include "moesh/spmd/tensor.h"

namespace moesh {

namespace raw {
/// y, whose first `num_dims` dimensions are those of x.
at::Tensor check_rows(const at::Tensor& x, at::Tensor y, std::int64_t num_dims, const char* what);
/// forward(x), with the gradient that `adjoint` makes of the gradient of the result.
at::Tensor map_linear(const at::Tensor& x,
                      const std::function<at::Tensor(const at::Tensor&)>& forward,
                      std::function<at::Tensor(const at::Tensor&)> adjoint);
}  // namespace raw

/// The layout of a function of several tensors, row by row.
template <Layout L>
constexpr L mapped(Unary kind, L first, Layout auto... more) {
  L out = apply(kind, first);
  ((out = mix(Op::mul, out, apply(kind, more))), ...);
  return out;
}

/// f(x, more...), where dimension 0 of x and of the result numbers the rows: tokens or sequences. f
/// sees all features of a row.
template <class Fn, auto L, auto... Ls>
auto map_rows(Fn f, const Tensor<L>& x, const Tensor<Ls>&... more) {
  constexpr auto out = mapped(Unary::over_features, L, Ls...);
  return assume<out>(raw::check_rows(x.local(), f(x.local(), more.local()...), 1, "map_rows"));
}

/// f(x, more...), where x and the result are [B, L, heads, ..] and a row is one head of one token.
/// F on an axis cuts the heads, and f sees all features of a head.
template <class Fn, auto L, auto... Ls>
auto map_heads(Fn f, const Tensor<L>& x, const Tensor<Ls>&... more) {
  constexpr auto out = mapped(Unary::nonlinear, L, Ls...);
  return assume<out>(raw::check_rows(x.local(), f(x.local(), more.local()...), 3, "map_heads"));
}

/// A linear function of this rank's own part, such as another order of its rows; backward calls
/// `adjoint`. Ranks on which x is R, I or P pass the same function, so that the layout stays.
template <class Fn, class Adjoint, auto L>
Tensor<L> map_linear(Fn f, Adjoint adjoint, const Tensor<L>& x) {
  return assume<L>(raw::map_linear(x.local(), f, adjoint));
}

}  // namespace moesh
