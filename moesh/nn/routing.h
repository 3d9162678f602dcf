#pragma once
// The experts of every token and MoE layer of an optimizer step: recorded, and replayed by global
// token, whatever the mesh and however the step is cut into micro-batches.

#include <ATen/core/Tensor.h>

#include <string>

#include "moesh/nn/probe.h"

namespace moesh::nn {

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
