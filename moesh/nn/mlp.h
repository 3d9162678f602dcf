#pragma once
// The dense SwiGLU: down (silu(gate x) * up x), column and row cut over tp. Also the shared experts
// of a MoE layer.

#include <string>

#include "moesh/nn/linear.h"
#include "moesh/nn/residual.h"
#include "moesh/spmd/recompute.h"

namespace moesh::nn {

/// (silu(gate) up) w^T of plain tensors [.., F] and w [D, F]; kept for backward are these three,
/// and not what is in the brackets.
at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& w);

/// The same, by the features of the hidden layer that a rank has.
template <auto L, auto W>
auto swiglu_linear(const Tensor<L>& gate, const Tensor<L>& up, const Tensor<W>& w) {
  constexpr auto hidden = mix(Op::mul, apply(Unary::nonlinear, L), L);
  constexpr auto out = mix(Op::linear, hidden, W);
  return assume<out>(swiglu_linear(gate.local(), up.local(), w.local()));
}

class Mlp {
 public:
  Mlp(const std::string& name, std::int64_t dim, std::int64_t ffn, const ModuleOptions& o)
      : gate_(column(name + ".gate_proj", ffn, dim, o)),
        up_(column(name + ".up_proj", ffn, dim, o)),
        down_(row(name + ".down_proj", dim, ffn, o)) {}

  Sum operator()(const Full& x) const {
    const auto gate = kept_linear(x, use(gate_)), up = kept_linear(x, use(up_));
    return swiglu_linear(gate, up, use(down_));
  }

  template <class Fn>
  void each_param(Fn f) {
    f(gate_), f(up_), f(down_);
  }

 private:
  Cut gate_, up_, down_;
};

}  // namespace moesh::nn
