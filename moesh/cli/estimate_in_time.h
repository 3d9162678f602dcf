#pragma once
// moesh estimate --cluster: how long a step would take, and which meshes are the fastest.

#include <cstddef>
#include <string>

#include "moesh/cli/command_line.h"

namespace moesh::cli {

constexpr std::size_t kMostListed = 20;  // meshes of a search

/// `cluster` is the value of --cluster.
int run_estimate_in_time(const std::string& cluster, const Given& given);

}  // namespace moesh::cli
