#pragma once
// What the routers of a model chose: watched, recorded and replayed.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "moesh/nn/tokens.h"

namespace moesh::nn {

// Lets code outside see, and change, part of a forward pass: the choice of experts. A pass
// without a probe pays for a null pointer.

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

// The experts of every token and MoE layer of an optimizer step: recorded, and replayed by global
// token, whatever the mesh and however the step is cut into micro-batches.

// L MoE layers of the model, T tokens of the step: its sequences one behind the other; K top-k

struct StepRouting {
  // Whole numbers, on the host: where tokens go, and what a balance loss counts. Undefined, or -1
  // for all K of a token: its experts are not given.
  at::Tensor experts_LTK, for_balance_LTK;
  std::string name = "the routing";  // what errors call it
};

/// The places of this rank's tokens among those of the step, int64 [N].
at::Tensor places_in_step(const Choice& choice);

/// The probe of one rank.
class RoutingProbe : public Probe {
 public:
  StepRouting* record = nullptr;        // gets the experts of this rank's tokens, as it uses them
  const StepRouting* replay = nullptr;  // gives them; where it has none, the router chooses
  /// Throws Error (data) if `replay` names an expert twice, or one that does not exist.
  at::Tensor on_choice(const Choice& choice) override;
};

}  // namespace moesh::nn
