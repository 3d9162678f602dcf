#pragma once
// The arguments of `moesh tokenize` as options.

#include "moesh/cli/commands.h"
#include "moesh/data/tokenize.h"

namespace moesh::cli {

data::TokenizeOptions tokenize_options(const Arguments& given);

}  // namespace moesh::cli
