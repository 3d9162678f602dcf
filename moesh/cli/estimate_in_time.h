#pragma once
// moesh estimate --cluster: how long a step would take, and which meshes are the fastest.

#include <string>

#include "moesh/cli/command_line.h"

namespace moesh::cli {

/// `cluster` is the value of --cluster.
int run_estimate_in_time(const std::string& cluster, const Given& given);

}  // namespace moesh::cli
