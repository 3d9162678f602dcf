#pragma once
// The dense SwiGLU: down (silu(gate x) * up x), column and row cut over tp. Also the shared experts
// of a MoE layer.

#include <string>

#include "moesh/nn/linear.h"
#include "moesh/nn/residual.h"

namespace moesh::nn {

/// silu(gate) up of plain tensors; kept for backward are these two alone.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// The same of each feature that a rank has.
template <auto L>
auto swiglu(const Tensor<L>& gate, const Tensor<L>& up) {
  const auto each = [](const Tensor<L>& x) { return unflatten(x, -1, {local(x).size(-1), 1}); };
  return flatten(map_heads([](const at::Tensor& g, const at::Tensor& u) { return swiglu(g, u); },
                           each(gate), each(up)),
                 -2, -1);
}

class Mlp {
 public:
  Mlp(const std::string& name, std::int64_t dim, std::int64_t ffn, const ModuleOptions& o)
      : gate_(column(name + ".gate_proj", ffn, dim, o)),
        up_(column(name + ".up_proj", ffn, dim, o)),
        down_(row(name + ".down_proj", dim, ffn, o)) {}

  Sum operator()(const Full& x) const {
    return linear(swiglu(linear(x, use(gate_)), linear(x, use(up_))), use(down_));
  }

  template <class Fn>
  void each_param(Fn f) {
    f(gate_), f(up_), f(down_);
  }

 private:
  Cut gate_, up_, down_;
};

}  // namespace moesh::nn
