#pragma once
#include <string>

#include "moesh/kernels/graph.h"
#include "moesh/verify/verify.h"

namespace moesh::verify {

/// Trains one_rank(c.config) for a few steps as `moesh train` does, with CUDA graphs, and once more
/// without: every loss, norm, count, weight, moment and expert bias must have the same bits. What
/// has not, in words; "" where all have, and where the device has no graphs.
std::string graph_mismatch(const VerifyCase& c, const kernels::Graphs& graphs = {});

}  // namespace moesh::verify
