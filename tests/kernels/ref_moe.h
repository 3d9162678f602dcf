#pragma once
// The MoE layer on one rank, written from the formula: a loop over tokens and their experts, one
// vector at a time. Slow and obvious; no code is common to it and the fast path. Only plain ATen
// ops are used, so that gradients come from LibTorch's autograd when inputs require them. Meant for
// float64. T tokens, D model, F ffn, E experts, K top-k

#include <ATen/core/Tensor.h>

#include "moesh/kernels/experts.h"

namespace moesh::kernels::ref {

enum class ScoreFunction { sigmoid, softmax, softmax_of_chosen };

struct RouterConfig {
  ScoreFunction score = ScoreFunction::sigmoid;
  std::int64_t top_k = 1;
  // Node-limited routing: experts in equal groups, of which a token may use the top_groups best, by
  // the sum of the two best experts of each.
  std::int64_t num_groups = 1, top_groups = 1;
  bool normalise = false;
  double epsilon = 0;
  double scale = 1;
};

struct Routing {
  at::Tensor experts_TK;  // int64
  at::Tensor weights_TK;  // differentiable in the logits
};

/// bias_E (may be undefined) steers the choice and takes no part in the weights.
Routing route(const RouterConfig& config, const at::Tensor& logits_TE, const at::Tensor& bias_E);

/// sum over k of expert[t, k] of x[t], with the weight on the side that `config` names.
at::Tensor experts(const ExpertsConfig& config, const ExpertsWeights& weights,
                   const at::Tensor& x_TD, const Routing& routing);

struct MoeParameters {
  at::Tensor gate_ED;
  at::Tensor gate_bias_E;    // may be undefined
  at::Tensor expert_bias_E;  // may be undefined
  ExpertsWeights experts;
};

/// Router and experts. Shared experts are a plain MLP beside it, and not part of this.
at::Tensor moe(const RouterConfig& router, const ExpertsConfig& config,
               const MoeParameters& parameters, const at::Tensor& x_TD);

}  // namespace moesh::kernels::ref
