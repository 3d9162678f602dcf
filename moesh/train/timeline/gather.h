#pragma once
// Collects the records of all ranks on rank 0.

#include <cstdint>
#include <vector>

#include "moesh/base/timeline.h"
#include "moesh/comm/group.h"
#include "moesh/train/timeline/kernels.h"

namespace moesh::train {

/// The record of a rank, and where it ran.
struct RankRecord {
  std::int64_t begin = 0;    // of the recording
  std::int64_t machine = 0;  // the same number: the same clock
  std::int64_t process = 0;
  TimelineRecord timeline;
  std::vector<KernelSpan> kernels;  // of the process, in the record of one of its ranks
};

/// The rank that calls it, and when.
RankRecord here_and_now();

/// As whole numbers, which every backend sends; and back, or an Error (internal).
std::vector<std::int64_t> to_words(const RankRecord& record);
RankRecord from_words(const std::vector<std::int64_t>& words);

/// The records by rank, only on rank 0; nothing on the others. Kernels are with the rank for
/// which they were launched, and if that is unknown, with the rank that recorded them.
std::vector<RankRecord> gather(comm::Group& world, const RankRecord& mine);

}  // namespace moesh::train
