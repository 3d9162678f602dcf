#pragma once
// How many bytes a rank sends: by group, and to other nodes.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "moesh/comm/group.h"

namespace moesh::comm {

/// The bytes that a rank sends in a collective or a message, by the way that moves the least: a
/// ring, or rows straight to their rank. `bytes` is what the rank puts in, `own` the part of it
/// that stays with the rank (reduce_scatter, all_to_all).
std::int64_t sent_bytes(Collective op, std::int64_t bytes, std::int64_t own, int num_ranks);

/// The bytes that a rank sends in an operation, as above, by where they go.
struct SentParts {
  std::int64_t inside = 0, between = 0;  // to ranks of its own node, to other nodes
};
/// Ranks of the world are numbered node by node (0: all are on one). Rows go straight to their
/// rank; what all ranks of a node need enters it once, and sums are taken on a node before they
/// leave it.
SentParts sent_parts(const Operation& operation, int ranks_per_node);

/// The bytes that one rank sends, by the name of the group ("tp", "dp_shard|cp") and the
/// collective. It receives as much, where shards are even.
struct Traffic {
  std::int64_t num_calls = 0, num_bytes = 0;
};
using Ledger = std::map<std::pair<std::string, Collective>, Traffic>;

/// While it lives, counts what this thread sends.
class SentBytes final : public ThreadObserver {
 public:
  void called(const Operation& operation) override;
  const Ledger& ledger() const { return ledger_; }
  /// The bytes since the last call, by group.
  std::map<std::string, std::int64_t> take();

 private:
  Ledger ledger_;
};

// Ranks that trust no one: before each collective of a group they compare what they are about to
// do, and values that are promised to be the same on every rank (R and I) are compared by hash. So
// starting an operation waits for the other ranks.

/// From now on the ranks of the group compare; every rank calls it. Groups that come from this one
/// are checked, too.
void check_ranks(Group& group);

}  // namespace moesh::comm

namespace moesh::comm::flight {

// The flight recorder: the last collectives of each rank with their times, to be read when a rank
// was lost or hangs.

/// How many a rank remembers.
constexpr std::size_t kLength = 256;

/// The last collectives of a rank. Each thread has one of its own, until it uses that of another:
/// all threads of a rank, such as one that saves, write into one.
class Recorder;
std::shared_ptr<Recorder> current();
void use(std::shared_ptr<Recorder> recorder);

/// While it lives, what this thread calls and waits for is a part of `what`, as in "forward of
/// stage 2 for micro-batch 0".
class ActivityScope {
 public:
  explicit ActivityScope(std::string what);

 private:
  ScopedValue<std::string> scope_;
};

/// The observer of this thread, which writes into its recorder.
Observer& of_thread();

/// The last collectives that the threads of this recorder called, the oldest first: a line each
/// with its number, when it was called, how long it took or that it has not ended, and what it was,
/// of what.
std::string text(Recorder& recorder = *current());

/// The collective that the rank of a recorder waits for.
struct Waiting {
  std::string what;
  std::chrono::duration<double> time;  // so far
};
std::optional<Waiting> waiting(Recorder& recorder);

}  // namespace moesh::comm::flight
