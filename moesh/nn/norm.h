#pragma once
// RMSNorm: x / sqrt(mean(x^2) + eps) * w over the last dimension, in float32 inside.

#include <string>

#include "moesh/spmd/param.h"
#include "moesh/spmd/tensor.h"

namespace moesh::nn {

namespace raw {
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& w, double eps);
}

class RmsNorm {
 public:
  RmsNorm() = default;
  RmsNorm(const std::string& name, std::int64_t dim, double eps, at::ScalarType dtype, at::Device device)
      : weight_(
            {.name = name + ".weight", .shape = {dim}, .dtype = dtype == at::kBFloat16 ? at::kFloat : dtype, .device = device},
            {.kind = Init::Kind::ones}),
        eps_(eps) {}

  /// On work that is split: every rank has other tokens, or other uses of the same ones.
  template <auto L>
  Tensor<L> operator()(const Tensor<L>& x) const {
    constexpr auto normal = apply(Unary::over_features, L);
    static_assert(mix(Op::mul, normal, Dense{Place::R, Place::R, Place::R}) == L);
    return assume<L>(raw::rms_norm(x.local(), use(weight_).local(), eps_));
  }
  /// On a stream that is the same on all tp ranks: they all do the same work.
  template <auto L>
  Tensor<L> invariant(const Tensor<L>& x) const {
    static_assert(mix(Op::mul, apply(Unary::over_features, L), Dense{Place::R, Place::R, Place::I}) == L);
    return assume<L>(raw::rms_norm(x.local(), use<tp>(weight_).local(), eps_));
  }

  template <class Fn>
  void each_param(Fn f) {
    f(weight_);
  }

 private:
  Param<Dense{Place::I, Place::I, Place::I}> weight_;
  double eps_ = 1e-6;
};

}  // namespace moesh::nn
