#pragma once
// What verify sees of forward passes: the routing, recorded on one mesh and replayed on another,
// and the first and the last tensor of the model.

#include <atomic>
#include <memory>
#include <vector>

#include "moesh/nn/probe.h"

namespace moesh::verify {

/// The choices of one MoE layer by global token, since near ties flip between roundings. Ranks
/// write and read their own tokens.
struct RoutingRecord {
  // int64, on the host, where tokens go and what a balance loss counts; the sequences of a step
  // stand one behind the other, however it is cut into micro-batches
  at::Tensor experts_TK, for_balance_TK;
  std::atomic<std::int64_t> num_flipped =
      0;                                   // choices that would have been different in the replay
  std::atomic<double> largest_margin = 0;  // of the choice scores, among them
  RoutingRecord(std::int64_t num_tokens, std::int64_t top_k);
};

/// One for each MoE layer.
using RoutingRecords = std::vector<std::unique_ptr<RoutingRecord>>;

/// The probe of one rank.
class VerifyProbe final : public nn::Probe {
 public:
  RoutingRecords* record = nullptr;  // gets the choices
  RoutingRecords* replay = nullptr;  // gives them
  /// For each micro-batch since begin_step: the stream that entered the first block, which has its
  /// gradient after backward, and the logits.
  std::vector<at::Tensor> inputs, logits_BLV;

  void begin_step() { inputs.clear(), logits_BLV.clear(); }

  void on_input(const at::Tensor& x_BLD) override;
  at::Tensor on_choice(const nn::Choice& choice) override;
  void on_logits(const at::Tensor& logits) override { logits_BLV.push_back(logits.detach()); }
};

}  // namespace moesh::verify
