#pragma once
// Several meshes against one rank, as `moesh verify` and its Python function ask for them.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "moesh/formats/json.h"
#include "moesh/kernels/graph.h"
#include "moesh/verify/verify.h"

namespace moesh::verify {

/// The configured mesh, or those of a sweep; throws Error (config) where both are given.
std::vector<Config> meshes_of(const Config& config, const std::optional<Sweep>& sweep);

/// The result of one mesh.
struct Verified {
  const Config& config;
  const VerifyReport& report;
  double seconds;  // with those of the reference, where this mesh is the first that needs it
  const VerifyReference& reference;
  const NamedTensors& values;  // of the mesh, where they are asked for
};

/// Runs every configuration for this many steps, one after the other. Meshes on which the run has
/// the same numbers share a reference.
void verify_all(const std::vector<Config>& configs, int steps, bool keep_values,
                const std::function<void(const Verified& verified)>& each);

/// Whether the embedding of its model is the head as well.
bool is_tied(const Config& config);

/// As --json has it.
formats::JsonValue to_json(const Verified& verified);

/// Trains one_rank(c.config) for a few steps as `moesh train` does, with CUDA graphs, and once more
/// without: every loss, norm, count, weight, moment and expert bias must have the same bits. What
/// has not, in words; "" where all have, and where the device has no graphs.
std::string graph_mismatch(const VerifyCase& c, const kernels::Graphs& graphs = {});

}  // namespace moesh::verify
