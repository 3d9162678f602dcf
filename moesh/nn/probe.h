#pragma once
// Lets code outside see, and change, part of a forward pass: the choice of experts. A pass
// without a probe pays for a null pointer.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "moesh/nn/tokens.h"

namespace moesh::nn {

enum class Pass { training, evaluation, recompute };

/// The experts which one MoE layer has chosen for this rank's tokens.
struct Choice {
  std::int64_t layer,
      micro_batch;  // the number of the MoE layer, and of the micro-batch in its step
  Pass pass;
  const Tokens& tokens;
  at::Tensor scores_NE;  // which the choice was made on: with bias, -inf outside of the best groups
  at::Tensor experts_NK;  // int64
  bool for_balance;       // what a balance loss counts, not where tokens go: see balance_loss
};

class Probe {
 public:
  virtual ~Probe() = default;
  /// The residual stream that enters the first block, as this rank has it.
  virtual void on_input(const at::Tensor& /*x_BLD*/) {}
  /// The experts that the layer shall use, or its balance loss count: [N, K] as it chose them.
  virtual at::Tensor on_choice(const Choice& choice) { return choice.experts_NK; }
  /// The logits of this cp rank's tokens and this tp rank's vocabulary, which are computed only
  /// for probes that want them.
  virtual bool wants_logits() const { return false; }
  virtual void on_logits(const at::Tensor& /*logits_BLV*/) {}
};

}  // namespace moesh::nn
