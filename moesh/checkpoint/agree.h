#pragma once
// Work at which one rank fails counts as failed on all ranks.

#include <functional>
#include <string>

#include "moesh/comm/group.h"

namespace moesh::checkpoint {

/// Long work calls this between its pieces, so that ranks that have finished know that this one is
/// alive: the deadline of a wait does not limit how much may be read or written. It throws if
/// another rank has failed. Empty for work that only one rank does. In a helper thread it does
/// nothing: the thread of the rank must call it while it waits for the helper.
using Heartbeat = std::function<void()>;

inline void beat(const Heartbeat& heartbeat) {
  if (heartbeat) heartbeat();
}

/// Runs `f` (no collectives in it) on every rank. If it throws on any, it throws on all: the error
/// of the first such rank, which is named.
void together(comm::Group& group, const std::function<void()>& f);
/// The same for work that may take longer than ranks wait for each other: they meet every half
/// second, as soon as each has called its heartbeat, and one that failed stops the others there.
void together(comm::Group& group, const std::function<void(const Heartbeat& heartbeat)>& f);

/// The text of rank 0, on every rank.
std::string text_of_first(comm::Group& group, const std::string& text);

}  // namespace moesh::checkpoint
