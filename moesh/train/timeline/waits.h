#pragma once
// How long the ranks waited for the slowest of them.

#include <cstdint>
#include <string>
#include <vector>

#include "moesh/train/timeline/gather.h"

namespace moesh::train {

/// Of a rank in a collective.
struct Wait {
  std::int64_t nanoseconds = 0;  // in which it waited, and the slowest rank had not come
  int slowest = -1;              // the world rank that came last
  std::string unknown = "";      // the reason why nothing of this can be told; empty: it can
};

/// By rank and collective. All ranks of a group make the same calls in the same order, so the k-th
/// all_reduce on it is the same one for all; and the k-th message of a channel is that at both
/// ends.
std::vector<std::vector<Wait>> find_waits(const std::vector<RankRecord>& records);

}  // namespace moesh::train
