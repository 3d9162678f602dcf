#pragma once
// What one rank fails to do counts as done by none.

#include <functional>
#include <string>

#include "moesh/comm/group.h"

namespace moesh::checkpoint {

/// Runs `f` (no collectives in it) on every rank. If it throws on any, it throws on all: the error
/// of the first such rank, which is named.
void together(comm::Group& group, const std::function<void()>& f);

/// The text of rank 0, on every rank.
std::string text_of_first(comm::Group& group, const std::string& text);

}  // namespace moesh::checkpoint
