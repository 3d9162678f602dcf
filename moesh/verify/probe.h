#pragma once
// Observes forward passes for verify: the routing, recorded on one mesh and replayed on another,
// and the first and the last tensor of the model.

#include <atomic>
#include <vector>

#include "moesh/nn/routing.h"

namespace moesh::verify {

/// The choices of a step by global token, since near ties flip between roundings. Ranks write and
/// read their own tokens.
struct RoutingRecord : nn::StepRouting {
  std::atomic<std::int64_t> num_flipped =
      0;                                   // choices that would have been different in the replay
  std::atomic<double> largest_margin = 0;  // of the choice scores, among them
  RoutingRecord(std::int64_t num_layers, std::int64_t num_tokens, std::int64_t top_k);
  void forget_flips() { num_flipped = 0, largest_margin = 0; }
};

/// The probe of one rank.
class VerifyProbe final : public nn::RoutingProbe {
 public:
  RoutingRecord* flips = nullptr;  // gets the choices that are replayed and would be others
  /// For each micro-batch since begin_step: the stream that entered the first block, which has its
  /// gradient after backward, and the logits.
  std::vector<at::Tensor> inputs, logits_BLV;

  void begin_step() { inputs.clear(), logits_BLV.clear(); }
  /// The choices of another run.
  void replay_from(RoutingRecord* other) { replay = flips = other; }

  void on_input(const at::Tensor& x_BLD) override;
  at::Tensor on_choice(const nn::Choice& choice) override;
  bool wants_logits() const override { return true; }
  void on_logits(const at::Tensor& logits) override { logits_BLV.push_back(logits.detach()); }
};

}  // namespace moesh::verify
