#pragma once
// Linear layers beyond linear(x, w) of ops.h.

#include "moesh/spmd/ops.h"

namespace moesh {
namespace raw {

/// x w^T over the last dimension, as `y`, which has its value; undefined: it is computed. Its
/// gradients are those of at::linear, to the bit; that of w is left for later, where it may be.
at::Tensor known_linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y);

at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b);

}  // namespace raw

/// x w^T + b over the last dimension, rounded once: the product is not written without the bias.
template <auto A, auto B, auto C>
auto linear(const Tensor<A>& x, const Tensor<B>& w, const Tensor<C>& b) {
  constexpr auto out = mix(Op::add, mix(Op::linear, A, B), C);
  return assume<out>(raw::linear(x.local(), w.local(), b.local()));
}

}  // namespace moesh
