#pragma once
// The commands of the program `moesh`; each returns its exit code.

#include <string>
#include <vector>

#include "moesh/cli/command_line.h"

namespace moesh::cli {

/// All of them, in the order of the help.
const std::vector<Command>& commands();

/// moesh train | verify | compare | estimate | report | demo | convert | inspect | tokenize |
/// generate | print-config | help ...
int run_command(const Args& args);

int run_verify(const Given& given);
int run_compare(const Given& given);
int run_estimate(const Given& given);
int run_convert(const Given& given);
int run_inspect(const Given& given);
int run_tokenize(const Given& given);
int run_generate(const Given& given);
int run_report(const Given& given);

}  // namespace moesh::cli
