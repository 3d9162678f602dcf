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
class SentBytes {
 public:
  SentBytes();
  ~SentBytes();
  SentBytes(const SentBytes&) = delete;
  SentBytes& operator=(const SentBytes&) = delete;

  /// Since the last call.
  std::map<std::string, std::int64_t> take();

 private:
  friend void count_sent(const std::string& group, std::int64_t bytes);
  std::map<std::string, std::int64_t> bytes_;
  SentBytes* outer_;
};

/// For the groups themselves.
void count_sent(const std::string& group, std::int64_t bytes);

}  // namespace moesh::comm
