#pragma once
// Tensor<Dense{T, T, R}>: a LibTorch tensor whose placement on every axis is part of its type.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "moesh/types/tensor.h"

namespace moesh {

template <auto L>
using Tensor = Typed<L, at::Tensor>;

/// The way out of the types: this rank's part of the tensor.
template <auto L>
const at::Tensor& local(const Tensor<L>& x) {
  return x.local();
}

/// The way in: a promise about a plain tensor.
template <auto L>
Tensor<L> assume(at::Tensor x) {
  return Tensor<L>::assume(std::move(x));
}

/// A value that needs no gradient and that every rank has: choice bias, RoPE table, mask, labels.
template <Layout L = Dense>
auto constant(const at::Tensor& x) {
  return Tensor<L{Place::R, Place::R, Place::R}>::assume(x.detach());
}

/// For a custom operation: calls fn on the local parts and declares the layout of what it returns.
/// Only nn/ uses it.
template <auto Out, class Fn, auto... Ls>
Tensor<Out> declare(Fn fn, const Tensor<Ls>&... xs) {
  return Tensor<Out>::assume(fn(xs.local()...));
}

/// float64 in float64 runs, float32 in all others: of master weights and the reduction of their
/// gradients, the router, tables of angles, norms and losses.
constexpr at::ScalarType wide_dtype(at::ScalarType run) {
  return run == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace moesh
