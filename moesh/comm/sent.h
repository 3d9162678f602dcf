#pragma once
// How many bytes a rank sends, by group.

#include <cstdint>
#include <map>
#include <string>

#include "moesh/comm/group.h"

namespace moesh::comm {

/// What a rank sends in a collective or a message, on the way that moves the least: a ring, or rows
/// straight to their rank. `bytes` is what the rank puts in, `own` the part of it that stays with
/// the rank (reduce_scatter, all_to_all).
std::int64_t sent_bytes(Collective op, std::int64_t bytes, std::int64_t own, int num_ranks);

/// While it lives, sums up what this thread sends, by the name of the group: "tp", "dp_shard|cp".
class SentBytes final : public ThreadObserver {
 public:
  void called(const Operation& operation) override;
  /// Since the last call.
  std::map<std::string, std::int64_t> take();

 private:
  std::map<std::string, std::int64_t> bytes_;
};

}  // namespace moesh::comm
