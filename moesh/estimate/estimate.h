#pragma once
// What a run would take, without running it: one rank of the mesh goes through a training step by
// itself on the device meta, where tensors have shapes and no memory. So the numbers come from the
// very program that trains, whatever the model, the mesh and the options. Routed rows are taken to
// spread evenly over the experts.

#include <cstdint>
#include <optional>
#include <vector>

#include "moesh/comm/fake/fake_group.h"
#include "moesh/config/config.h"
#include "moesh/formats/json.h"
#include "moesh/train/build.h"

namespace moesh::estimate {

using config::Config;

/// Bytes that a rank holds through the whole run. It is rank 0: where something does not divide,
/// the first ranks have more.
struct StateMemory {
  std::int64_t weights = 0, gradients = 0, optimizer = 0;
  std::int64_t total() const { return weights + gradients + optimizer; }
};

struct Estimate {
  MeshShape mesh;
  std::int64_t num_parameters = 0, num_active_parameters = 0;  // of the whole model
  std::int64_t num_tokens = 0;                                 // of an optimizer step, on all ranks
  StateMemory state, expert_state;                             // the second is part of the first
  std::int64_t tp_gradients = 0;  // bytes of gradients that tp ranks sum, shard by shard
  std::int64_t peak = 0;          // the most that the rank holds at once
  std::int64_t num_reads = 0;     // of the device by the host, in the step
  comm::Ledger traffic;           // what the rank sends in an optimizer step

  /// What the step adds to the state at its peak: activations, logits, gathered parameters,
  /// temporaries.
  std::int64_t activations() const { return peak - state.total(); }
  std::int64_t moved() const;
  /// Bytes that all ranks send for a token: comparable between meshes, whose steps differ in size.
  double moved_per_token() const;
};

/// On the mesh, the options and the device of the configuration, which this machine need not have.
/// With a limit: nothing where the state of a rank alone is larger.
std::optional<Estimate> estimate(const Config& config, std::optional<std::int64_t> limit);
Estimate estimate(const Config& config);

/// The same where the gradients are there from the beginning, as in every micro-batch of a step but
/// the first: then the peak is the state and what comes on top of all of it.
Estimate estimate_later_micro_batch(const Config& config);

/// The bytes that a rank holds through the whole run: no step is gone through.
StateMemory state_memory(const Config& config);

/// As --json has it.
formats::JsonValue to_json(const Estimate& e);

struct SearchResult {
  std::vector<Estimate> best;  // those that send the fewest bytes a token first
  int num_meshes = 0;          // of this many ranks
  int num_tried = 0;           // the others cannot be among the best, or are not for this model
};

/// Of the meshes of num_ranks ranks on which a rank needs no more than `limit` bytes, the `most`
/// that send the fewest bytes a token. Degrees of the configuration that are not 1 stay as they
/// are.
SearchResult search(const Config& config, int num_ranks, std::int64_t limit, size_t most);

}  // namespace moesh::estimate
