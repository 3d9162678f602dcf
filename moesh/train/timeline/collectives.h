#pragma once
// The collectives of a rank, in its Timeline.

#include <cstdint>
#include <map>

#include "moesh/base/timeline.h"
#include "moesh/comm/group.h"

namespace moesh::train {

/// While it lives, every collective that this thread starts is in the timeline.
class RecordCollectives final : public comm::ThreadObserver {
 public:
  explicit RecordCollectives(Timeline& timeline) : timeline_(timeline) {}

  void called(const comm::Operation& operation) override;
  void started(std::int64_t number) override;
  void waits(std::int64_t number) override;
  void ended(std::int64_t number) override;

 private:
  Timeline& timeline_;
  std::map<std::int64_t, std::int64_t> numbers_;  // in the timeline, of what has not ended
};

}  // namespace moesh::train
