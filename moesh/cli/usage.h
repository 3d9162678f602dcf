#pragma once
// The help of one command, out of the help of all.

#include <string>

namespace moesh::cli {

/// Of a text that describes commands, each from a line "  NAME ..." up to the next such line, the
/// part of one of them; empty where it describes none of that name.
std::string usage_of(const std::string& all, const std::string& command);

}  // namespace moesh::cli
