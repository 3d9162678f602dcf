#pragma once
// Typed operations without communication. The layout of the result comes from the mixing table
// (moesh/types/mixing.h); what the table refuses does not compile. The work is one call of LibTorch
// here, or a function in ops.cpp.

#include <ATen/core/ivalue.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>

#include <functional>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

/// The products of a linear layer with its weight [out, in], where they are not LibTorch's. The
/// gradient of the weight is what it always is.
class LinearProducts : public torch::CustomClassHolder {
 public:
  /// x w^T over the last dimension.
  virtual at::Tensor forward(const at::Tensor& x, const at::Tensor& w) const = 0;
  /// rows w, of rows [N, out]: the gradient of the input.
  virtual at::Tensor backward(const at::Tensor& rows, const at::Tensor& w) const = 0;
};
using OwnProducts = c10::intrusive_ptr<LinearProducts>;  // null: LibTorch's

/// Own products may round the gradient of their result. That of an R is a part of a sum on each
/// rank, and the sum of rounded parts is not the rounded sum.
template <auto Out>
const OwnProducts& of_whole_gradients(const OwnProducts& own) {
  if constexpr (axes_with(Out, Place::R) != none)
    MOESH_CHECK(!own, "own products of a linear layer whose result is R on ",
                to_string(axes_with(Out, Place::R)), "; its gradient is a partial sum there");
  return own;
}

namespace raw {
at::Tensor for_several(const at::Tensor& x);
/// b may be undefined.
at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b = {},
                  const OwnProducts& own = {});
/// x w^T over the last dimension, as `y`, which has its value; undefined: it is computed. Its
/// gradients are those of at::linear, to the bit; that of w is left for later, where it may be.
at::Tensor known_linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b,
                        const at::Tensor& y, const OwnProducts& own = {});
at::Tensor plus_product(const at::Tensor& w, const at::Tensor& b, const at::Tensor& a,
                        double factor);
at::Tensor add(const at::Tensor& a, const at::Tensor& b);
at::Tensor scale(const at::Tensor& x, const at::Tensor& factor);
/// The dimension that holds tokens (0 of [N] and [N, D]), features (1 of [N, D]), or experts or the
/// rows that were sent to them (0). Throws if there is none, and for tokens and features of more
/// than two dimensions, which may be [B, L, D] or [N, groups, members].
std::int64_t dim_of(Over over, const at::Tensor& x);
at::Tensor one_hot(const at::Tensor& index, std::int64_t num_values);
}  // namespace raw

/// x as the input of several linear layers: their products add their gradients of x to one sum,
/// without a separate pass.
template <auto L>
Tensor<L> for_several(const Tensor<L>& x) {
  return assume<L>(raw::for_several(x.local()));
}

/// x w^T over the last dimension. rows T, w R -> T; x R, w F -> F (column); x F, w F -> P (row);
/// rows E, w E -> E.
template <auto A, auto B>
auto linear(const Tensor<A>& x, const Tensor<B>& w, const OwnProducts& own = {}) {
  constexpr auto out = mix(Op::linear, A, B);
  return assume<out>(raw::linear(x.local(), w.local(), {}, of_whole_gradients<out>(own)));
}

/// w + factor b a, of matrices [out, in], [out, r] and [r, in]: w has the rows that b has, and the
/// columns that a has.
template <auto W, auto B, auto A>
auto plus_product(const Tensor<W>& w, const Tensor<B>& b, const Tensor<A>& a, double factor) {
  constexpr auto out = mix(Op::add, W, mix(Op::mul, B, A));
  return assume<out>(raw::plus_product(w.local(), b.local(), a.local(), factor));
}

template <auto A, auto B>
auto operator+(const Tensor<A>& a, const Tensor<B>& b) {
  constexpr auto out = mix(Op::add, A, B);
  return assume<out>(raw::add(a.local(), b.local()));
}

template <auto A, auto B>
auto operator*(const Tensor<A>& a, const Tensor<B>& b) {
  constexpr auto out = mix(Op::mul, A, B);
  return assume<out>(a.local().mul(b.local()));
}

/// factor * x: linear, so it keeps P.
template <auto L>
auto scale(const Tensor<L>& x, double factor) {
  return assume<L>(x.local().mul(factor));
}
/// The same by a scalar of the device, which has one value on all ranks and needs no gradient.
template <auto L>
auto scale(const Tensor<L>& x, const at::Tensor& factor) {
  return assume<L>(raw::scale(x.local(), factor));
}

template <auto L>
auto silu(const Tensor<L>& x) {
  constexpr auto out = apply(Unary::nonlinear, L);
  return assume<out>(at::silu(x.local()));
}

template <auto L>
auto square(const Tensor<L>& x) {
  constexpr auto out = apply(Unary::nonlinear, L);
  return assume<out>(x.local().square());
}

template <auto L>
auto sqrt(const Tensor<L>& x) {
  constexpr auto out = apply(Unary::nonlinear, L);
  return assume<out>(x.local().sqrt());
}

/// The sum over the dimension that holds tokens, features or experts (raw::dim_of): P on every axis
/// where that very thing varies.
template <Over O, auto L>
auto sum(const Tensor<L>& x) {
  constexpr auto out = sum(O, L);
  return assume<out>(x.local().sum(raw::dim_of(O, x.local())));
}
// A dimension by its number may hold anything: the compiler's message is the cure.
template <auto>
inline constexpr bool kDimsAreNamedByTheirKind = false;
template <Over O, auto L>
auto sum(const Tensor<L>&, const std::vector<std::int64_t>&) {
  static_assert(kDimsAreNamedByTheirKind<L>,
                "dimensions are named by what they hold: sum<Over::tokens>(x) sums those of the "
                "tokens, sum<Over::features>(x) those of the features");
}

/// P wherever anything varies.
constexpr auto sum_of_all(Layout auto layout) {
  return each(layout, [](Place p) { return varies(p) ? Place::P : p; });
}

/// The sum of everything, a scalar.
template <auto L>
auto sum_all(const Tensor<L>& x) {
  constexpr auto out = sum_of_all(L);
  return assume<out>(x.local().sum());
}

/// bool [.., num_values] of indices [.., K]: true at those that are among the K of their row, which
/// has all values.
template <auto L>
auto one_hot(const Tensor<L>& index, std::int64_t num_values) {
  constexpr auto out = apply(Unary::over_features, L);
  return assume<out>(raw::one_hot(index.local(), num_values));
}

// Linear ways to look at a tensor. They keep the layout: a rank's own elements stay its own.
template <auto L>
Tensor<L> cast(const Tensor<L>& x, at::ScalarType dtype) {
  return assume<L>(x.local().to(dtype));
}
/// Without its graph.
template <auto L>
Tensor<L> detach(const Tensor<L>& x) {
  return assume<L>(x.local().detach());
}
template <auto L>
Tensor<L> select(const Tensor<L>& x, std::int64_t dim, std::int64_t index) {
  return assume<L>(x.local().select(dim, index));
}
template <auto L>
Tensor<L> narrow(const Tensor<L>& x, std::int64_t dim, std::int64_t start, std::int64_t length) {
  return assume<L>(x.local().narrow(dim, start, length));
}
/// The dimensions first .. last become one.
template <auto L>
Tensor<L> flatten(const Tensor<L>& x, std::int64_t first, std::int64_t last) {
  return assume<L>(x.local().flatten(first, last));
}
/// One dimension becomes several.
template <auto L>
Tensor<L> unflatten(const Tensor<L>& x, std::int64_t dim, at::IntArrayRef sizes) {
  return assume<L>(x.local().unflatten(dim, sizes));
}
template <auto L>
std::vector<at::Tensor> locals(const std::vector<Tensor<L>>& xs) {
  std::vector<at::Tensor> plain;
  for (const auto& x : xs) plain.push_back(x.local());
  return plain;
}
/// Side by side along a dimension, and along a new first one.
template <auto L>
Tensor<L> cat(const std::vector<Tensor<L>>& parts, std::int64_t dim) {
  return assume<L>(at::cat(locals(parts), dim));
}
template <auto L>
Tensor<L> stack(const std::vector<Tensor<L>>& parts) {
  return assume<L>(at::stack(locals(parts)));
}

/// x w^T + b over the last dimension, rounded once: the product is not written without the bias.
template <auto A, auto B, auto C>
auto linear(const Tensor<A>& x, const Tensor<B>& w, const Tensor<C>& b,
            const OwnProducts& own = {}) {
  constexpr auto out = mix(Op::add, mix(Op::linear, A, B), C);
  return assume<out>(raw::linear(x.local(), w.local(), b.local(), of_whole_gradients<out>(own)));
}

// Functions of rows, written on plain tensors: each rank calls them on the rows that it holds. The
// mixing table gives the layout of the result, and combinations that it refuses do not compile. The
// number of rows is checked at run time. The author promises that f looks at one row at a time.

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

// Only these functions read numbers. They accept values that every rank has whole, never a partial
// sum or a shard.

namespace raw {
double number(const at::Tensor& x);
at::Tensor clip_factor(const at::Tensor& norm, double max_norm);
}  // namespace raw

/// The plain tensor of a value that every rank has whole: what `local` gives, with the promise
/// checked.
template <auto L>
const at::Tensor& whole(const Tensor<L>& x) {
  [[maybe_unused]] constexpr auto checked = check_whole(L);
  return x.local();
}

/// The value of a scalar.
template <auto L>
double number(const Tensor<L>& x) {
  [[maybe_unused]] constexpr auto checked = check_whole(L);
  return raw::number(x.local());
}

/// min(1, max_norm / norm), the factor that clips gradients, on the device of the norm. `norm` is
/// that of all gradients on all ranks; if it is not finite, the user of the factor skips the step.
template <auto L>
at::Tensor clip_factor(const Tensor<L>& norm, double max_norm) {
  [[maybe_unused]] constexpr auto checked = check_whole(L);
  return raw::clip_factor(norm.local(), max_norm);
}

}  // namespace moesh
