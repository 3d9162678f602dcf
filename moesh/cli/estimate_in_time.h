#pragma once
// moesh estimate --cluster and --search: how long a step would take, and what is the fastest.

#include "moesh/cli/command_line.h"

namespace moesh::cli {

int run_estimate_in_time(const Arguments& given);

}  // namespace moesh::cli
