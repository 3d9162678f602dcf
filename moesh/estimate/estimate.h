#pragma once
// What a run would take, without running it: one rank of the mesh goes through a training step by
// itself on the device meta, where tensors have shapes and no memory. So the numbers come from the
// very program that trains, whatever the model, the mesh and the options. Routed rows are taken to
// spread evenly over the experts.

#include <cstdint>
#include <optional>
#include <vector>

#include "moesh/comm/observers.h"
#include "moesh/config/config.h"
#include "moesh/formats/json.h"
#include "moesh/kernels/meta/work.h"
#include "moesh/pipeline/simulate.h"
#include "moesh/train/build.h"

namespace moesh::estimate {

using config::Config;

/// Bytes that a rank holds through the whole run. It is the first rank of its stages: where
/// something does not divide, the first ranks have more.
struct StateMemory {
  std::int64_t weights = 0, gradients = 0, optimizer = 0;
  std::int64_t total() const { return weights + gradients + optimizer; }
  /// This and so many times the other.
  StateMemory plus(const StateMemory& other, double times = 1) const;
};

/// Adds so many times the other.
void add(comm::Ledger& to, const comm::Ledger& other, double times);

/// Bytes that one micro-batch holds on a stage.
struct StageLive {
  std::int64_t activation = 0;  // from its forward to its backward, or to the half for the inputs
  std::int64_t kept = 0;        // from that half to the one for the weights
  /// While it runs, the most on top of what is held before.
  std::int64_t in_forward = 0, in_backward = 0, in_weights = 0;
};

/// The micro-batches that a rank works on at once. One that is on two stages of the rank counts
/// twice.
struct LiveMemory {
  int num_alive = 0;        // the most between forward and backward, or its half for the inputs
  int num_halves = 0;       // the most between the halves of backward
  std::int64_t tokens = 0;  // bytes of a micro-batch itself, which is there through the whole step
  std::vector<StageLive> stages;  // of this rank
};

/// What forwards and backwards have the kernels do, and send. Gathering parameters, and adding up
/// gradients, are not in it: they depend on the size of a shard.
struct PassWork {
  kernels::meta::WorkLedger forward, again, backward;  // again: computed once more, for backward
  comm::Ledger sent_in_forward;                        // of all traffic
};

struct RankKind;
struct Estimate {
  MeshShape mesh;
  int rank_of_pp = 0;                                          // the one that holds the most
  std::int64_t num_parameters = 0, num_active_parameters = 0;  // of the whole model
  std::int64_t num_stage_parameters = 0;                       // of the stages of this rank
  std::int64_t num_tokens = 0;                                 // of an optimizer step, on all ranks
  StateMemory state, expert_state;                             // the second is part of the first
  std::int64_t tp_gradients = 0;  // bytes of gradients that tp ranks sum, shard by shard
  std::int64_t peak = 0;          // the most that the rank holds at once
  std::int64_t num_reads = 0;     // of the device by the host, in the step
  LiveMemory live;
  PassWork work;                // where it was asked for
  comm::Ledger traffic;         // what rank 0 of pp sends in an optimizer step, as metrics count it
  std::vector<RankKind> kinds;  // of the ranks of pp; one without pp

  /// What the step adds to the state at its peak: activations, logits, gathered parameters,
  /// temporaries.
  std::int64_t activations() const { return peak - state.total(); }
  std::int64_t moved() const;
};

/// Ranks of pp whose stages have the same layers, by the one of them that holds the most.
struct RankKind {
  std::vector<int> ranks;                       // of pp
  std::vector<models::LayerRange> layers = {};  // of each of its stages
  Estimate most = {};
  std::int64_t sent = 0;  // bytes, in an optimizer step
};

/// How many micro-batches these actions of a rank have between forward and backward at most.
int most_alive(const std::vector<pipeline::Action>& actions);
/// The same between the halves of backward.
int most_halves(const std::vector<pipeline::Action>& actions);

/// What the rank of pp holds that holds the most, on the mesh, the options and the device of the
/// configuration, which this machine need not have.
Estimate estimate(const Config& config);

/// The same where the gradients are there from the beginning, as in every micro-batch of a step but
/// the first: then the peak is the state and what comes on top of all of it. On the rank of cp that
/// works longest, with its work.
Estimate estimate_later_micro_batch(const Config& config);

/// The bytes that a rank holds through the whole run, for each rank of pp: no step is gone through.
std::vector<StateMemory> state_of_ranks(const Config& config);

/// As many micro-batches of a step as show all that a rank does in it: after them the schedule
/// repeats itself, but for GPipe, which holds one more activation for each.
std::int64_t enough_micro_batches(const Config& config);

/// As --json has it.
formats::JsonValue to_json(const Estimate& e);

}  // namespace moesh::estimate
