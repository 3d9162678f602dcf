#pragma once
// Files with the experts of every token: moe.record writes them, moe.replay reads them. There is
// one file for each step, an .npy of [L, T, K] integers: MoE layers, tokens of the step in the
// order of the data, top-k.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "moesh/comm/group.h"
#include "moesh/nn/routing.h"
#include "moesh/train/build.h"

namespace moesh::train {

/// The name of a step's file; steps count from 1.
std::string routing_name(std::int64_t step);

/// The experts that moe.replay has for a step; nothing if the option is empty. The file is mapped:
/// a rank reads only what it asks for. Throws Error (data) where it is missing, or not of this
/// run's sizes.
std::optional<nn::StepRouting> read_routing(const Config& config, const models::Model& model,
                                            std::int64_t step);

/// Replays, and keeps the experts of the tokens that this rank has.
class RoutingRecorder : public nn::RoutingProbe {
 public:
  at::Tensor on_choice(const nn::Choice& choice) override;
  void begin() { parts_.clear(); }
  /// The experts of `count` tokens of the step, in a layer: [count, K] int32, -1 where this rank
  /// has no token.
  at::Tensor experts(std::int64_t layer, std::int64_t first, std::int64_t count,
                     std::int64_t top_k) const;

  bool records = false;

 private:
  struct RoutedPart {  // a layer of a micro-batch
    std::int64_t layer;
    at::Tensor places_N, experts_NK;
  };
  std::vector<RoutedPart> parts_;
};

/// Records or replays the routing of a run (moe.record, moe.replay); all ranks make the same calls.
class RoutingFiles {
 public:
  RoutingFiles(const Config& config, const models::Model& model, comm::Group& world);

  /// The options with the probe for recording or replaying, if either is on.
  StepOptions with_probe(StepOptions options);
  void begin_step(std::int64_t step);
  /// Returns when the file of the step is on the disk.
  void end_step(std::int64_t step);

 private:
  void write(const std::filesystem::path& path) const;

  const Config& config_;
  const models::Model& model_;
  comm::Group& world_;
  RoutingRecorder probe_;
  std::optional<nn::StepRouting> given_;
};

}  // namespace moesh::train
