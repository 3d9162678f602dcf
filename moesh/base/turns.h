#pragma once
// Several pieces of work for one rank that take turns: while what one of them waits for is on its
// way, another one goes on. They call functions that know nothing of it, in any depth, and backward
// passes of autograd; so each has a thread of its own, and only one of these runs at a time. Whose
// turn it is depends on the work, not on time: it is the same on every rank. The threads are kept
// for the next time: what libraries prepare in each of them is there already.

#include <functional>
#include <vector>

namespace moesh {

/// Does all of them, the first in this thread, and returns when all have ended. Each keeps its turn
/// until it calls next_turn() or ends; then it is that of the next in the list, and after the last
/// one the first again. If one throws, the others end in their next_turn(), and it is thrown here.
/// Threads have what this_thread.h has. While a trace is recorded, the turns of others are slices.
void take_turns(const std::vector<std::function<void()>>& work);

/// The others go on, each until it calls this as well. Without turns nothing happens.
void next_turn();

}  // namespace moesh
