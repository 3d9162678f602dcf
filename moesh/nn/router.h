#pragma once
// The router: scores, the choice of experts, and counts and probabilities for balance and losses.
// Everything is local to a token: T on all axes. N local tokens, D model, E experts, K top-k

#include <cstdint>
#include <optional>
#include <string>

#include "moesh/kernels/routing.h"
#include "moesh/nn/linear.h"
#include "moesh/nn/residual.h"
#include "moesh/nn/routing.h"
#include "moesh/nn/tokens.h"
#include "moesh/spmd/tensor.h"

namespace moesh::nn {

// The logits of the router with their gradient. T tokens, D model, E experts

/// x gate' in the precision of the gate: a linear layer of few columns, which keeps x as it is.
/// The cast and the product that it stands for would keep x once more, in float32.
at::Tensor gate_logits(const at::Tensor& x_TD, const at::Tensor& gate_ED);

template <auto A, auto B>
auto gate_logits(const Tensor<A>& x_TD, const Tensor<B>& gate_ED) {
  constexpr auto out = mix(Op::linear, A, B);
  return assume<out>(gate_logits(local(x_TD), local(gate_ED)));
}

/// A sum over tokens, not yet taken over the ranks.
using TokenSum = Tensor<Dense{Place::P, Place::P, Place::P}>;

using kernels::Scoring;  // softmax_chosen: top-k of the logits

/// The tokens over which a balance loss compares the load of experts.
enum class BalanceOver { sequence, micro_batch };

struct RouterConfig {
  std::int64_t num_experts = 0, top_k = 0;
  Scoring scoring = Scoring::sigmoid;
  bool choose_on_logits = false;  // Llama 4: the choice is made before the sigmoid
  // MiniMax: the balance loss takes the softmax of the logits, not sigmoids that add up to one.
  bool balance_softmax = false;
  // Node-limited routing: only experts of the best groups (by the sum of the top 2 of each).
  std::int64_t num_groups = 1, top_groups = 1;
  bool normalize = false;  // weights of a token add up to one
  double epsilon = 1e-20;  // added to that sum
  double scale = 1;
  bool gate_bias = false;
  bool forced_balance = false;  // for benchmarks: a token's experts follow from its global index

  void validate() const;
};

struct RouteOptions {
  Pass pass = Pass::training;
  Probe* probe = nullptr;
  std::int64_t layer = 0, micro_batch = 0;  // what the probe is told of this call
};

struct Route {
  PerToken experts_NK;  // int64
  PerToken weights_NK;  // multiply an expert's input or output; float32 (float64 in float64 runs)
  PerToken logits_NE;
  TokenSum counts_E;  // int64: rows of each expert, of the tokens that count
  PerToken valid_N1;  // bool: the tokens that count for balance and losses; undefined: all
};

class Router {
 public:
  /// The gate is float32, and float64 in float64 runs.
  Router(const RouterConfig& config, const std::string& name, std::int64_t dim,
         const ModuleOptions& o);

  Route choose(const PerToken& x_ND, const Tokens& tokens, const RouteOptions& options = {});

  /// Moves the expert bias once per optimizer step by coeff * sign(mean - n), minus its mean, from
  /// the counts of all training passes since the last call, summed over dp, cp and tp. Where the
  /// scalar `skip` is given and not 0 it stays. Counting begins anew. A run without the bias calls
  /// clear_counts instead.
  void update_bias(double coeff, const at::Tensor& skip = {});
  void clear_counts();

  const RouterConfig& config() const { return config_; }
  Uncut& gate() { return gate_; }
  std::optional<Uncut>& gate_bias() { return gate_bias_; }
  /// Steers the choice only; float32 (float64), the same on every rank.
  at::Tensor& expert_bias() { return expert_bias_E_; }
  /// int64: the counts since the bias last moved, not yet summed over dp, cp and tp.
  const TokenSum& pending_counts() const { return pending_counts_E_; }
  /// The counts of all ranks together, as a checkpoint stores them.
  void set_pending_counts(const Tensor<Dense{Place::R, Place::R, Place::R}>& total_E);

 private:
  PerToken choose_experts(const PerToken& logits_NE, const Tokens& tokens,
                          const RouteOptions& options) const;

  RouterConfig config_;
  Uncut gate_;
  std::optional<Uncut> gate_bias_;
  // Both are written in place: a CUDA graph of a step has their addresses.
  at::Tensor expert_bias_E_;
  TokenSum pending_counts_E_;  // int64
};

// Auxiliary losses: terms to add to a loss that is a sum over the tokens of the whole optimizer
// step divided by their number (num_step_tokens, a float64 scalar of the device or of the host).

/// What a balance loss takes for the scores: sigmoids that add up to one, or the softmax.
PerToken probabilities(const Route& route, const RouterConfig& config);

/// How unevenly the experts are loaded: E / (K T^2) * sum_e n_e * sum_t p_te, 1 where they are
/// balanced, times T / num_step_tokens, over the T valid tokens of each sequence, summed over the
/// sequences: the same number on every mesh, and however the step is cut into micro-batches. Or
/// over those of the micro-batch, on all ranks together, which depends on how the step is cut. n_e
/// counts the tokens that have e among their K best scores (without expert bias and groups:
/// equation 18 of DeepSeek-V3's report), and has no gradient. `options` are those that the route
/// was chosen with.
TokenSum balance_loss(const Route& route, const RouterConfig& config, const Tokens& tokens,
                      const at::Tensor& num_step_tokens, BalanceOver over,
                      const RouteOptions& options = {});
/// sum_t logsumexp(logits_t)^2 / num_step_tokens.
TokenSum z_loss(const Route& route, const at::Tensor& num_step_tokens);

}  // namespace moesh::nn
