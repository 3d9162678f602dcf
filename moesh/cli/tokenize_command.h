#pragma once
// What the arguments of `moesh tokenize` ask for.

#include "moesh/cli/commands.h"
#include "moesh/data/tokenize.h"

namespace moesh::cli {

data::TokenizeOptions tokenize_options(const Arguments& given);

}  // namespace moesh::cli
