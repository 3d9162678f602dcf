#pragma once
// The proof that a mesh computes what one device computes: the same model, seed and data on one
// rank and on the mesh, several optimizer steps, everything compared.

#include <string>
#include <vector>

#include "moesh/comm/launch.h"
#include "moesh/config/config.h"
#include "moesh/models/registry.h"
#include "moesh/train/step.h"
#include "moesh/verify/parity.h"

namespace moesh::verify {

using config::Config;
using config::OptimizerSection;

struct VerifyCase {
  models::AnyConfig model;
  models::ModelOptions options;
  std::int64_t batch = 2;  // sequences of each dp rank and micro-batch
  std::int64_t sequence = 8;
  int accumulation = 2, steps = 2;
  bool sequence_parallel = true, recompute = false, reshard = false;
  models::Auxiliary auxiliary{.switch_weight = 0.01, .sequence_weight = 0.01, .z_weight = 0.001};
  double lr = 0.01, max_norm = 1, bias_coeff = 0.01;
  double ignored = 0.1;  // fraction of labels that are -100
  OptimizerSection optimizer;

  double tolerance() const;
  bool replays() const { return options.dtype != at::kDouble; }
};

/// What the reference gives; `routing` is by step, micro-batch and MoE layer.
struct VerifyReference : NamedTensors {
  std::vector<std::vector<std::unique_ptr<nn::RoutingRecord>>> routing;
};

struct VerifyReport {
  std::vector<Mismatch> mismatches;
  std::string error;
  bool is_first = false;  // this process holds rank 0: it speaks for all
  std::int64_t num_flipped = 0;
  double largest_margin = 0;
  double worst_ratio = 0;  // the largest |delta| / allowed
  bool holds() const { return mismatches.empty() && error.empty(); }
  /// What a person can act on: the first tensor that differs, factors, axes, the worst token and
  /// rank.
  std::string describe(const MeshShape& mesh) const;
};

/// On one rank, with the batch of num_dp dp ranks.
VerifyReference run_reference(const VerifyCase& c, int num_dp);

/// `values`, if given, gets the tensors that the ranks have, put together; all ranks must be
/// threads of this process.
VerifyReport verify(const VerifyCase& c, const VerifyReference& reference, const MeshShape& shape,
                    const comm::LaunchOptions& options = {}, NamedTensors* values = nullptr);

/// The case with heads and experts that the mesh divides, for sweeps: as they are where they fit.
VerifyCase fitted(VerifyCase c, const MeshShape& shape);

}  // namespace moesh::verify
