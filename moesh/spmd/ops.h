#pragma once
// Typed operations without communication. The layout of the result comes from the mixing table
// (moesh/types/mixing.h); what the table refuses does not compile. The work is one line of ATen in
// ops.cpp.

#include <vector>

#include "moesh/spmd/tensor.h"

namespace moesh {

namespace raw {
at::Tensor linear(const at::Tensor& x, const at::Tensor& w);
at::Tensor add(const at::Tensor& a, const at::Tensor& b);
at::Tensor sub(const at::Tensor& a, const at::Tensor& b);
at::Tensor mul(const at::Tensor& a, const at::Tensor& b);
at::Tensor scale(const at::Tensor& x, double factor);
at::Tensor add_scalar(const at::Tensor& x, double value);
at::Tensor silu(const at::Tensor& x);
at::Tensor square(const at::Tensor& x);
at::Tensor softmax(const at::Tensor& x);
/// In float32 or wider inside; an undefined w is no weight.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& w, double eps);
at::Tensor sum(const at::Tensor& x, const std::vector<std::int64_t>& dims);
at::Tensor cast(const at::Tensor& x, at::ScalarType dtype);
at::Tensor select(const at::Tensor& x, std::int64_t dim, std::int64_t index);
at::Tensor narrow(const at::Tensor& x, std::int64_t dim, std::int64_t start, std::int64_t length);
at::Tensor cat(const std::vector<at::Tensor>& parts, std::int64_t dim);
}  // namespace raw

/// x w^T over the last dimension. rows T, w R -> T; x R, w F -> F (column); x F, w F -> P (row);
/// rows E, w E -> E.
template <auto A, auto B>
auto linear(const Tensor<A>& x, const Tensor<B>& w) {
  constexpr auto out = mix(Op::linear, A, B);
  return assume<out>(raw::linear(x.local(), w.local()));
}

template <auto A, auto B>
auto operator+(const Tensor<A>& a, const Tensor<B>& b) {
  constexpr auto out = mix(Op::add, A, B);
  return assume<out>(raw::add(a.local(), b.local()));
}

template <auto A, auto B>
auto operator-(const Tensor<A>& a, const Tensor<B>& b) {
  constexpr auto out = mix(Op::add, A, B);
  return assume<out>(raw::sub(a.local(), b.local()));
}

template <auto A, auto B>
auto operator*(const Tensor<A>& a, const Tensor<B>& b) {
  constexpr auto out = mix(Op::mul, A, B);
  return assume<out>(raw::mul(a.local(), b.local()));
}

/// factor * x: linear, so it keeps P.
template <auto L>
auto scale(const Tensor<L>& x, double factor) {
  return assume<L>(raw::scale(x.local(), factor));
}

/// x + value: not linear; on a partial sum it would count once per rank.
template <auto L>
auto add_scalar(const Tensor<L>& x, double value) {
  constexpr auto out = apply(Unary::nonlinear, L);
  return assume<out>(raw::add_scalar(x.local(), value));
}

template <auto L>
auto silu(const Tensor<L>& x) {
  constexpr auto out = apply(Unary::nonlinear, L);
  return assume<out>(raw::silu(x.local()));
}

template <auto L>
auto square(const Tensor<L>& x) {
  constexpr auto out = apply(Unary::nonlinear, L);
  return assume<out>(raw::square(x.local()));
}

/// Over the last dimension.
template <auto L>
auto softmax(const Tensor<L>& x) {
  constexpr auto out = apply(Unary::over_features, L);
  return assume<out>(raw::softmax(x.local()));
}

/// x / sqrt(mean(x^2) + eps) * w over the last dimension.
template <auto A, auto B>
auto rms_norm(const Tensor<A>& x, const Tensor<B>& w, double eps) {
  constexpr auto out = mix(Op::mul, apply(Unary::over_features, A), B);
  return assume<out>(raw::rms_norm(x.local(), w.local(), eps));
}

/// The sum over the given dimensions, which hold tokens, features or experts: P on every axis where
/// that very thing varies.
template <Over O, auto L>
auto sum(const Tensor<L>& x, const std::vector<std::int64_t>& dims) {
  constexpr auto out = sum(O, L);
  return assume<out>(raw::sum(x.local(), dims));
}

/// The sum of everything, a scalar: P wherever anything varies.
template <auto L>
auto sum_all(const Tensor<L>& x) {
  constexpr auto out = each(L, [](Place p) { return varies(p) ? Place::P : p; });
  return assume<out>(raw::sum(x.local(), {}));
}

/// Linear ways to look at a part: they keep the layout.
template <auto L>
auto cast(const Tensor<L>& x, at::ScalarType dtype) {
  return assume<L>(raw::cast(x.local(), dtype));
}
template <auto L>
auto select(const Tensor<L>& x, std::int64_t dim, std::int64_t index) {
  return assume<L>(raw::select(x.local(), dim, index));
}
template <auto L>
auto narrow(const Tensor<L>& x, std::int64_t dim, std::int64_t start, std::int64_t length) {
  return assume<L>(raw::narrow(x.local(), dim, start, length));
}
template <auto L>
auto cat(const std::vector<Tensor<L>>& parts, std::int64_t dim) {
  std::vector<at::Tensor> plain;
  for (const auto& p : parts) plain.push_back(p.local());
  return assume<L>(raw::cat(plain, dim));
}

}  // namespace moesh
