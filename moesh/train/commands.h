#pragma once
#include <string>
#include <vector>

namespace moesh::train {

/// moesh train | verify | print-config | demo | help ...: the exit code of the command.
int run_command(const std::vector<std::string>& args);

}  // namespace moesh::train
