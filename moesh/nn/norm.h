#pragma once
// RMSNorm: x / sqrt(mean(x^2) + eps) * w over the last dimension. Weight and all, it is computed in
// float32 and rounded once.

#include <ATen/TensorOperators.h>

#include <optional>
#include <string>
#include <utility>

#include "moesh/kernels/rowwise.h"
#include "moesh/nn/linear.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/tensor.h"

namespace moesh::nn {

/// Normalises the rows of a plain tensor [.., features]; an undefined weight means no weight. With
/// `turn` the rows are heads [B, L, h, d], which then turn.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                    const std::optional<kernels::Rotation>& turn = {});

/// The same, and x itself, to add to later: backward adds up what comes by both ways in the pass
/// of the norm.
std::pair<at::Tensor, at::Tensor> rms_norm_beside(const at::Tensor& x, const at::Tensor& weight,
                                                  double eps);

/// Each row with all of its features.
template <auto A, auto B>
auto rms_norm(const Tensor<A>& x, const Tensor<B>& weight, double eps) {
  return map_rows(
      [&](const at::Tensor& rows, const at::Tensor& w) { return rms_norm(rows, w, eps); }, x,
      weight);
}

template <auto A, auto B>
std::pair<Tensor<A>, Tensor<A>> rms_norm_beside(const Tensor<A>& x, const Tensor<B>& weight,
                                                double eps) {
  at::Tensor same;
  const auto normal = map_rows(
      [&](const at::Tensor& rows, const at::Tensor& w) {
        auto both = rms_norm_beside(rows, w, eps);
        same = both.second;
        return both.first;
      },
      x, weight);
  return {normal, map_rows([&](const at::Tensor&) { return same; }, x)};
}

/// The factor of a norm: its weight, or 1 + its weight, which begins at zero.
enum class NormWeight { plain, zero_centred };

class RmsNorm {
 public:
  RmsNorm() = default;
  RmsNorm(const std::string& name, std::int64_t dim, double eps, const ModuleOptions& o,
          NormWeight kind = NormWeight::plain)
      : weight_(o.wide_spec(name + ".weight", {dim}),
                {.kind = kind == NormWeight::plain ? Init::Distribution::ones
                                                   : Init::Distribution::zeros}),
        eps_(eps),
        kind_(kind) {}

  /// On work that is split: every rank has other tokens, or other uses of the same ones.
  template <auto L>
  Tensor<L> operator()(const Tensor<L>& x) const {
    return rms_norm(x, factor(use(weight_)), eps_);
  }
  /// On a stream that is the same on all tp ranks: they all do the same work.
  template <auto L>
  Tensor<L> invariant(const Tensor<L>& x) const {
    return rms_norm(x, factor(use<tp>(weight_)), eps_);
  }
  /// Either of the two, and x itself (rms_norm_beside).
  template <bool Invariant, auto L>
  std::pair<Tensor<L>, Tensor<L>> beside(const Tensor<L>& x) const {
    return rms_norm_beside(x, factor(use<Invariant ? tp : none>(weight_)), eps_);
  }
  /// On heads [B, L, h, d]: tp cuts the heads, and each is normalised over its own d features,
  /// which are whole; then it turns, if it is to.
  Tensor<Dense{Place::T, Place::T, Place::F}> per_head(
      const Tensor<Dense{Place::T, Place::T, Place::F}>& x,
      const std::optional<kernels::Rotation>& turn = {}) const {
    return map_heads([&](const at::Tensor& heads,
                         const at::Tensor& w) { return rms_norm(heads, w, eps_, turn); },
                     x, factor(use(weight_)));
  }

  template <class Fn>
  void each_param(Fn f) {
    f(weight_);
  }

 private:
  template <auto L>
  Tensor<L> factor(const Tensor<L>& weight) const {
    if (kind_ == NormWeight::plain) return weight;
    return map_rows([](const at::Tensor& w) { return w + 1; }, weight);
  }

  Uncut weight_;
  double eps_ = 1e-6;
  NormWeight kind_ = NormWeight::plain;
};

/// RMSNorm over the features of all tp ranks, each of which has a slice of them. The mean needs
/// their sum: all_reduce<tp>(squares(x)), which may travel with that of other norms.
class SplitRmsNorm {
 public:
  using Slice = Tensor<Dense{Place::T, Place::T, Place::F}>;  // [B, L, features of this rank]

  SplitRmsNorm(const std::string& name, std::int64_t dim, double eps, const ModuleOptions& o)
      : weight_(o.wide_spec(name + ".weight", {dim}, {{tp, 0}}),
                {.kind = Init::Distribution::ones}),
        dim_(dim),
        eps_(eps) {}

  /// [B * L]: the squares of this rank's features, added up.
  static Tensor<Dense{Place::T, Place::T, Place::P}> squares(const Slice& x_BLF);
  /// x, normalised, from the squares of all ranks.
  Slice operator()(const Slice& x_BLF,
                   const Tensor<Dense{Place::T, Place::T, Place::R}>& squares_N) const;

  template <class Fn>
  void each_param(Fn f) {
    f(weight_);
  }

 private:
  Cut weight_;
  std::int64_t dim_;
  double eps_;
};

}  // namespace moesh::nn
