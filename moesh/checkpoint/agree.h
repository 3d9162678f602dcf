#pragma once
// What one rank fails to do counts as done by none.

#include <functional>
#include <string>

#include "moesh/comm/group.h"

namespace moesh::checkpoint {

/// What long work calls between its pieces, so that those who have ended theirs know that this rank
/// is alive: how much there is to read or write has nothing to do with the deadline of a wait. It
/// throws when another rank has failed. Nothing for work that is done by one rank alone. In a
/// thread that helps the rank it does nothing: the rank's own must take breaths while it waits for
/// it.
using Breath = std::function<void()>;

inline void take(const Breath& breath) {
  if (breath) breath();
}

/// Runs `f` (no collectives in it) on every rank. If it throws on any, it throws on all: the error
/// of the first such rank, which is named.
void together(comm::Group& group, const std::function<void()>& f);
/// The same for work that may take longer than ranks wait for each other: they meet every half
/// second, as soon as each has taken a breath, and one that failed stops the others there.
void together(comm::Group& group, const std::function<void(const Breath& breath)>& f);

/// The text of rank 0, on every rank.
std::string text_of_first(comm::Group& group, const std::string& text);

}  // namespace moesh::checkpoint
