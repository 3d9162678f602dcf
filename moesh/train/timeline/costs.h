#pragma once
// Divides the time of the recorded steps into costs.

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/train/timeline/record.h"

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

/// How long the device has nothing to do after each of these, since the host learns the counts and
/// queues further work only then: by the place of the slice.
std::map<std::size_t, std::int64_t> idle_after_counts(const RankRecord& record);

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
  double after_counts_nanoseconds = 0, num_counts = 0;  // likewise: those of idle_after_counts
  std::vector<Cost> costs;  // the largest first; together they are the step
};

/// Where kernels were recorded, of the device: each kernel, and the time without one. A moment in
/// which several kernels of a rank run is divided evenly among them; what runs outside of a step is
/// no part of it. Else of the host: operators without those that they call, collectives, the wait
/// for the slowest rank in them, and the code between. The time of a slow link is none of a kernel.
TraceCosts costs_of(const std::vector<RankRecord>& records,
                    const std::vector<std::vector<Wait>>& waits);

/// A line for each of the `num` largest, with its share of a step; under a line that says of what.
std::string describe(const TraceCosts& costs, std::size_t num = 5);

}  // namespace moesh::train
