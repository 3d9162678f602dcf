#pragma once
// What follows attention in a block: the dense MLP, which shared experts are as well, and the
// routed experts: moving rows with gradients, and the grouped MLPs that the rows go through.

#include <ATen/ops/sigmoid.h>

#include <optional>
#include <string>
#include <utility>

#include "moesh/fsdp/param.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/kernels/experts.h"
#include "moesh/kernels/routing.h"
#include "moesh/nn/linear.h"
#include "moesh/nn/residual.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/tensor.h"

namespace moesh::nn {

// Rows in another order, with gradients: gathers both ways, never a scatter-add. Each rank moves
// rows that it holds, so that the layout stays: Rows is a Tensor<L>, or rows AtNode<L> between two
// hops.

/// out[i] = x[index[i]]; `inverse[j]` is where x[j] went, -1: nowhere. Backward gathers by
/// `inverse`.
template <class Rows>
Rows permute_rows(const Rows& x, const at::Tensor& index, const at::Tensor& inverse) {
  return map_linear(
      [&](const at::Tensor& t) { return kernels::gather_rows(t, index); },
      [inverse](const at::Tensor& g) { return kernels::gather_rows(g.contiguous(), inverse); }, x);
}

/// x_ND -> the K copies of each token, in the order of experts. Backward: combine_rows.
template <class Rows>
Rows spread_rows(const Rows& x_ND, const at::Tensor& token_R, const at::Tensor& inverse_NK) {
  return map_linear([&](const at::Tensor& t) { return kernels::gather_rows(t, token_R); },
                    [inverse_NK](const at::Tensor& g) {
                      return kernels::combine_rows(g.contiguous(), inverse_NK);
                    },
                    x_ND);
}

/// The scores of the rows that spread_rows makes, from those of each token; backward: each goes
/// back to its choice, and choices without a row get 0.
template <class Rows>
Rows scores_of_rows(const Rows& scores_NK, const kernels::Sorted& sorted) {
  return map_linear(
      [&](const at::Tensor& t) { return kernels::gather_rows(t.flatten(), sorted.order_R); },
      [inverse_NK = sorted.inverse_TK](const at::Tensor& g) {
        return kernels::gather_rows(g.contiguous(), inverse_NK.flatten()).view(inverse_NK.sizes());
      },
      scores_NK);
}

/// Sums the K rows of each token, in the order of k. Backward: spread_rows.
template <class Rows>
Rows combine_rows(const Rows& rows_RD, const at::Tensor& token_R, const at::Tensor& inverse_NK) {
  return map_linear(
      [&](const at::Tensor& t) {
        return raw::is_not_computed(t) ? raw::not_computed({inverse_NK.size(0), t.size(1)}, t)
                                       : kernels::combine_rows(t, inverse_NK);
      },
      [token_R](const at::Tensor& g) { return kernels::gather_rows(g.contiguous(), token_R); },
      rows_RD);
}

// The routed experts: parameters in the sparse view, own experts on ep (E), own features of each on
// etp (F). N local tokens, D model, F ffn, E experts, e local experts, K top-k, R rows at their
// experts

struct RoutedExpertsConfig {
  std::int64_t num_experts = 0, dim = 0, ffn = 0;
  kernels::Activation activation = kernels::Activation::swiglu;
  kernels::ScoreSide scores = kernels::ScoreSide::after;
  bool biases = false;

  void validate() const;
};

class Experts {
 public:
  using Weight = Param<Sparse{Place::I, Place::E, Place::F}>;  // own features on etp
  using Whole = Param<Sparse{Place::I, Place::E, Place::I}>;   // the same on every etp rank

  Experts(const RoutedExpertsConfig& config, const std::string& name, const ModuleOptions& o);

  /// Rows that arrived for this rank's experts, in the order of arrival -> their outputs in the
  /// same order, a partial sum over etp. `order` sorts them by expert.
  Tensor<Sparse{Place::T, Place::E, Place::P}> apply_to_rows(
      const Tensor<Sparse{Place::T, Place::E, Place::R}>& rows_RD,
      const Tensor<Sparse{Place::T, Place::E, Place::R}>& scores_R,
      const kernels::Reordered& order) const;

  /// All tokens of the ep x etp ranks -> the terms that this rank's experts add to the output of
  /// each, a partial sum over both.
  Tensor<Sparse{Place::T, Place::P, Place::P}> apply_to_tokens(
      const Tensor<Sparse{Place::T, Place::R, Place::R}>& x_ND,
      const Tensor<Sparse{Place::T, Place::R, Place::R}>& scores_NK,
      const at::Tensor& experts_NK) const;

  const RoutedExpertsConfig& config() const { return config_; }
  /// f(param) for each parameter, in the order w1, w3, w2, b1, b3, b2, and what LoRA adds.
  template <class Fn>
  void each_param(Fn f) {
    f(w1_), f(w3_), f(w2_);
    if (b1_) f(*b1_), f(*b3_), f(*b2_);
    if (gate_up_lora_) f(gate_up_lora_->a), f(gate_up_lora_->b);
    if (down_lora_) f(down_lora_->a), f(down_lora_->b);
  }

 private:
  template <auto L>
  auto run(const Tensor<L>& x, const Tensor<L>& scores_R, const at::Tensor& ends_e,
           const at::Tensor& token_R, const at::Tensor& inverse) const;

  RoutedExpertsConfig config_;
  Weight w1_, w3_, w2_;
  std::optional<Weight> b1_, b3_;
  std::optional<Whole> b2_;
  template <class A, class B>
  struct LoraMatrices {
    double scale;
    A a;
    B b;
  };
  // w1 and w3 are columns, w2 is a row: as the weights of linear.h.
  std::optional<LoraMatrices<Whole, Weight>> gate_up_lora_;  // A [E, r, D], B [E, 2, F, r]
  std::optional<LoraMatrices<Weight, Whole>> down_lora_;     // A [E, r, F], B [E, D, r]
};

// The dense SwiGLU: down (silu(gate x) * up x), column and row cut over tp.

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
