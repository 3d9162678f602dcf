#pragma once
// The commands of the program `moesh`; each returns its exit code.

#include <vector>

#include "moesh/cli/command_line.h"

namespace moesh::data {
struct TokenizeOptions;
}

namespace moesh::cli {

/// All of them, in the order of the help.
const std::vector<Command>& commands();

/// moesh train | verify | compare | estimate | report | demo | convert | inspect | tokenize |
/// generate | print-config | help ...
int run_command(const Args& args);

int run_verify(const Arguments& given);
int run_compare(const Arguments& given);
int run_estimate(const Arguments& given);
int run_convert(const Arguments& given);
int run_inspect(const Arguments& given);
int run_tokenize(const Arguments& given);
/// The arguments of `moesh tokenize` as options.
data::TokenizeOptions tokenize_options(const Arguments& given);
int run_generate(const Arguments& given);
int run_report(const Arguments& given);

}  // namespace moesh::cli
