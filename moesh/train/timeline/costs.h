#pragma once
// Divides the time of the recorded steps into costs.

#include <cstdint>
#include <string>
#include <vector>

#include "moesh/train/timeline/gather.h"

namespace moesh::train {

// How long the ranks waited for the slowest of them.

/// The wait of a rank in a collective.
struct Wait {
  std::int64_t nanoseconds = 0;  // in which it waited, and the slowest rank had not come
  int slowest = -1;              // the world rank that came last
  std::string unknown = "";      // the reason why nothing of this can be told; empty: it can
};

/// By rank and collective. All ranks of a group make the same calls in the same order, so the k-th
/// all_reduce on it is the same one for all; and the k-th message of a channel is that at both
/// ends.
std::vector<std::vector<Wait>> find_waits(const std::vector<RankRecord>& records);

struct Cost {
  std::string what;
  double nanoseconds = 0;  // of a step and rank, in the mean
  double calls = 0;        // likewise
};

struct TraceCosts {
  double step_nanoseconds = 0;  // of a step and rank, in the mean
  int num_steps = 0;
  bool of_device = false;           // else of the host
  double together_nanoseconds = 0;  // likewise: in which several kernels of a rank ran at once
  std::vector<Cost> costs;          // the largest first; together they are the step
};

/// Where kernels were recorded, of the device: each kernel, and the time without one. A moment in
/// which several kernels of a rank run is divided evenly among them; what runs outside of a step is
/// no part of it. Else of the host: operators without those that they call, collectives, the wait
/// for the slowest rank in them, and the code between.
TraceCosts costs_of(const std::vector<RankRecord>& records,
                    const std::vector<std::vector<Wait>>& waits);

/// A line for each of the `num` largest, with its share of a step; under a line that says of what.
std::string describe(const TraceCosts& costs, std::size_t num = 5);

}  // namespace moesh::train
