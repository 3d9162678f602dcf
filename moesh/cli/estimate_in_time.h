#pragma once
// moesh estimate --cluster: how long a step would take, and which meshes are the fastest.

#include <string>
#include <vector>

namespace moesh::cli {

/// `cluster` is the value of --cluster; `args` are the others.
int run_estimate_in_time(const std::string& cluster, std::vector<std::string> args);

}  // namespace moesh::cli
