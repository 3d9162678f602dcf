#pragma once
// The commands of the program `moesh`; each returns its exit code.

#include <string>
#include <vector>

namespace moesh::cli {

/// moesh train | verify | compare | estimate | report | demo | convert | inspect | tokenize |
/// generate | print-config | help ...
int run_command(const std::vector<std::string>& args);

int run_verify(std::vector<std::string> args);
int run_compare(std::vector<std::string> args);
int run_estimate(std::vector<std::string> args);
int run_convert(std::vector<std::string> args);
int run_inspect(std::vector<std::string> args);
int run_tokenize(std::vector<std::string> args);
int run_generate(std::vector<std::string> args);
int run_report(std::vector<std::string> args);

}  // namespace moesh::cli
