#pragma once
// The dense SwiGLU: down (silu(gate x) * up x), column and row cut over tp. Also the shared experts
// of a MoE layer.

#include <ATen/ops/sigmoid.h>

#include <optional>
#include <string>
#include <utility>

#include "moesh/fsdp/recompute.h"
#include "moesh/nn/linear.h"
#include "moesh/nn/residual.h"

namespace moesh::nn {

/// y = h w^T with h = silu(gate) up, of plain tensors [.., F] and w [D, F]. Kept for backward are
/// these three, and not h, which is another result if it is wanted (else undefined). With
/// `needs_values` the backward of what follows needs those of y, and a recompute computes them
/// again.
struct SwigluOptions {
  bool needs_values = false, wants_hidden = false;
};
std::pair<at::Tensor, at::Tensor> swiglu_linear(const at::Tensor& gate, const at::Tensor& up,
                                                const at::Tensor& w,
                                                const SwigluOptions& options = {},
                                                const OwnProducts& own = {});

/// The same, by the features of the hidden layer that a rank has.
template <auto L, auto W>
auto swiglu_linear(const Tensor<L>& gate, const Tensor<L>& up, const Tensor<W>& w,
                   const SwigluOptions& options = {}, const OwnProducts& own = {}) {
  constexpr auto hidden = mix(Op::mul, apply(Unary::nonlinear, L), L);
  constexpr auto out = mix(Op::linear, hidden, W);
  const auto [y, h] =
      swiglu_linear(gate.local(), up.local(), w.local(), options, of_whole_gradients<out>(own));
  return std::pair(assume<out>(y), assume<hidden>(h));
}

class Mlp {
 public:
  Mlp(const std::string& name, std::int64_t dim, std::int64_t ffn, const ModuleOptions& o)
      : gate_(column(name + ".gate_proj", ffn, dim, o)),
        up_(column(name + ".up_proj", ffn, dim, o)),
        down_(row(name + ".down_proj", dim, ffn, o)) {}

  /// `numbers` are those of the tokens (Tokens::numbers).
  Sum operator()(const Full& input, const at::Tensor& numbers = {},
                 bool needs_values = false) const {
    const Full x = for_several(input);
    const auto gate = gate_.kept(x, numbers), up = up_.kept(x, numbers);
    const auto [y, h] = swiglu_linear(
        gate, up, use(down_.weight()),
        {.needs_values = needs_values, .wants_hidden = down_.has_lora()}, down_.products());
    return down_.plus_lora(y, h, numbers);
  }

  template <class Fn>
  void each_param(Fn f) {
    gate_.each_param(f), up_.each_param(f), down_.each_param(f);
  }

 private:
  ColumnWeight gate_, up_;
  RowWeight down_;
};

/// The shared experts of a MoE layer: an MLP, in some models times sigmoid(x g), one number for
/// each token.
class SharedExperts {
 public:
  /// `gate_name` is empty if there is no gate.
  SharedExperts(const std::string& name, const std::string& gate_name, std::int64_t dim,
                std::int64_t ffn, const ModuleOptions& o)
      : mlp_(name, dim, ffn, o) {
    if (!gate_name.empty()) gate_ = Uncut(o.spec(gate_name + ".weight", {1, dim}), o.init);
  }

  Sum operator()(const Full& x, const at::Tensor& numbers = {}) const {
    const Sum y = mlp_(x, numbers, /*needs_values=*/gate_.has_value());
    if (!gate_) return y;
    const auto sigmoid = [](const at::Tensor& t) { return at::sigmoid(t); };
    return map_rows(sigmoid, linear(x, use(*gate_))) * y;
  }

  template <class Fn>
  void each_param(Fn f) {
    mlp_.each_param(f);
    if (gate_) f(*gate_);
  }

 private:
  Mlp mlp_;
  std::optional<Uncut> gate_;
};

}  // namespace moesh::nn
