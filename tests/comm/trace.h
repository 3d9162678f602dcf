#pragma once
// What a rank sends, in order.

#include <string>
#include <vector>

#include "moesh/comm/group.h"

namespace moesh::comm {

/// One collective as it was called.
struct TraceEntry {
  std::string group;
  Collective op;
  std::int64_t bytes;  // as those of the operation
};

/// While it lives, records every collective of more than one rank which this thread starts.
class Trace final : public ThreadObserver {
 public:
  void called(const Operation& o) override { entries_.push_back({o.group.name(), o.op, o.bytes}); }
  const std::vector<TraceEntry>& entries() const { return entries_; }

 private:
  std::vector<TraceEntry> entries_;
};

}  // namespace moesh::comm
