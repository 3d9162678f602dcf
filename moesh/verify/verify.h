#pragma once
// The proof that a mesh computes what one device computes: the first optimizer steps of a run, on
// the mesh of its configuration and on one rank, everything compared.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moesh/config/merge.h"
#include "moesh/train/build.h"
#include "moesh/verify/noise.h"
#include "moesh/verify/parity.h"
#include "moesh/verify/probe.h"
#include "moesh/verify/sweep.h"

namespace moesh::verify {

using config::Config;

struct VerifyCase {
  Config config;
  std::int64_t steps = 2;  // optimizer steps to compare, the first of the run
  double ignored = 0.1;    // fraction of labels that do not count, besides what the data ignores
  /// In narrow dtypes near ties would flip: the mesh takes the routing of the reference.
  bool replays() const { return config.training.dtype != "float64"; }
};

/// Where a proof wants other values than a training run, for `steps` steps: few tokens, and an odd
/// number of them; documents that end anywhere; auxiliary losses and an expert bias that count.
config::Settings verify_defaults(std::int64_t steps);

/// A mesh of one with the sequences of all ranks and the plainest path: what the mesh is compared
/// with. It cuts the step into micro-batches of another size, since that must not matter either.
Config one_rank(const Config& config);

/// Why one_rank cuts a step as the mesh does, so that verify says nothing of other ways; empty: it
/// does not.
std::string why_cut_alike(const Config& config);

/// With one micro-batch more than its pipeline has ranks, enough for every rank to work on several
/// at once, unless the user has set another number.
Config with_micro_batches(const Config& config, const std::string& origin);

/// On a mesh of a sweep, with heads, experts, layers and a global batch that it divides, and with a
/// few micro-batches for its pipeline: as they are where they fit. The embedding of a tied one is
/// the head, whatever the model says.
Config fitted(const Config& config, const SweepMesh& mesh);

/// By step.
using Routing = std::vector<std::unique_ptr<RoutingRecord>>;

struct VerifyReference : NamedTensors {
  Routing routing = {};
  std::vector<Mismatch> unexplained = {};  // of noise.h: no mesh holds then
  LeftOut left_out = {};
  std::string graph_mismatch = {};  // of graph_parity.h
  /// With noise that kNumNearbyInDoubt runs told, made for the first mesh that is in doubt.
  std::unique_ptr<VerifyReference> closer = {};
};

struct VerifyReport {
  std::vector<Mismatch> mismatches;
  std::string error;
  bool is_first = false;  // this process holds rank 0: it prints for all
  std::int64_t num_flipped = 0;
  double largest_margin = 0;
  /// With a golden file in bfloat16: tensors that rounding may change by half, along themselves.
  std::int64_t num_vague = 0;
  double worst_ratio = 0;         // the largest |delta| / allowed, of all processes
  std::string worst_tensor = {};  // which has it
  LeftOut left_out = {};
  bool holds() const { return mismatches.empty() && error.empty(); }
  /// Whether it does not hold, by so little that noise which is measured more closely may explain
  /// it: the same on all processes.
  bool is_in_doubt() const;
  /// Takes what was found to differ, and the worst of it.
  void add(const Findings& findings, const MeshShape& shape);
  void add_flips(const RoutingRecord& routing);
  /// The information to act on: the first tensor that differs, factors, axes, the worst token and
  /// rank.
  std::string describe(const MeshShape& mesh) const;
};

/// Launches the ranks of a mesh. What they throw is the report's error. It is thrown again where it
/// is no verdict on the mesh: it came before any of them began, memory was not enough, or it is of
/// what was asked for (config, data, storage).
void launch_for(VerifyReport& report, const Config& config,
                const std::function<void(comm::Group& world)>& f);

/// The run's data, with further labels that do not count.
std::unique_ptr<data::Dataset> open_data(const VerifyCase& c);

/// What each rank does, on the mesh of the configuration: `report` gets what it has of each tensor.
/// One rank may record its routing, and do a run nearby instead. Steps from `first_replayed` on
/// replay one.
void run_steps(const VerifyCase& c, const data::Dataset& data, comm::Group& world, Routing* record,
               Routing* replay, const std::function<void(const RankTensor&)>& report,
               const Nearby* nearby = nullptr, std::int64_t first_replayed = 0);

/// The largest of the numbers that the ranks have, on all of them.
double largest_of_ranks(comm::Group& world, double mine, at::Device device);

/// The case on one_rank(c.config), with what rounding does to it.
VerifyReference run_reference(const VerifyCase& c, std::uint64_t num_nearby = kNumNearby);

/// `values`, if given, gets the tensors that the ranks have, put together; all ranks must be
/// threads of this process.
VerifyReport verify(const VerifyCase& c, const VerifyReference& reference,
                    NamedTensors* values = nullptr);

/// verify(); where the report is in doubt, it is the mesh's turn again with reference.closer. The
/// first look at other meshes stays what it was.
VerifyReport verify_closely(const VerifyCase& c, VerifyReference& reference,
                            NamedTensors* values = nullptr);

}  // namespace moesh::verify
