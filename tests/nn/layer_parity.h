#pragma once
// The MoE layer on a mesh against the layer on one rank: output, d(x), the gradient of every
// parameter, counts and the updated bias. Same seed, same data by global token. What differs is
// reported with the factor that tells which reduction is wrong.

#include <string>
#include <vector>

#include "moesh/comm/launch.h"
#include "moesh/nn/moe.h"
#include "moesh/verify/parity.h"

namespace moesh::verify {

/// One layer, one micro-batch; sizes are those of the whole.
struct LayerCase {
  nn::MoeConfig layer;
  nn::ModuleOptions options;
  std::int64_t batch = 1;  // sequences of each dp rank
  std::int64_t sequence = 8;
  bool sequence_parallel = true;
  double balance_weight = 0, z_weight = 0;  // auxiliary losses in the objective
  nn::BalanceOver balance_over = nn::BalanceOver::sequence;
  bool identical_tokens = false;  // every token chooses the same experts
  bool equal_scores = false;      // the gate is zero: only the tie rule chooses
  bool replay = false;            // replay the routing of the reference: for float32 and bfloat16

  /// Short words for a report: "sp after all_to_all shared B3 L7".
  std::string describe() const;
};

/// What one run gives.
struct LayerResult : NamedTensors {
  std::shared_ptr<RoutingRecord> routing;
};

struct LayerReport {
  std::vector<Mismatch> mismatches;  // in forward order: the first is nearest to the cause
  std::int64_t num_flipped = 0;
  double largest_margin = 0;
  std::string error;  // what was thrown, if anything was
  bool holds() const { return mismatches.empty() && error.empty(); }
  std::string describe(const LayerCase& c, const MeshShape& mesh) const;
};

/// The tolerance of requirements for one layer: 1e-10 in float64, 1e-5 in float32, 2e-2 in
/// bfloat16.
double layer_tolerance(at::ScalarType dtype);

/// Runs the case on one rank, with the batch of all num_dp ranks.
LayerResult run_reference(const LayerCase& c, int num_dp);

/// Runs the cases one after another on one mesh, each against its reference. A fault in one ends
/// its world, not the others.
std::vector<LayerReport> compare_layer(const std::vector<LayerCase>& cases,
                                       const std::vector<const LayerResult*>& references,
                                       const MeshShape& shape,
                                       const comm::LaunchOptions& options = {});

}  // namespace moesh::verify
