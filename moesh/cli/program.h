#pragma once
// The program `moesh`, from its arguments to its exit code.

#include <string>
#include <vector>

namespace moesh::cli {

/// Runs a command; what it throws is said on standard error and becomes the exit code, as does
/// output that could not be written.
int run_program(const std::vector<std::string>& args);

}  // namespace moesh::cli
