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
  at::Tensor experts_TK;  // int64, on the host; micro-batches of a step stand one behind the other
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
  /// Of the last micro-batch: the stream that entered the first block, which has its gradient after
  /// backward, and the logits.
  at::Tensor input, logits_BLV;

  void on_input(const at::Tensor& x_BLD) override;
  at::Tensor on_choice(const nn::Choice& choice) override;
  void on_logits(const at::Tensor& logits) override { logits_BLV = logits.detach(); }
};

}  // namespace moesh::verify
