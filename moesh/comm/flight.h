#pragma once
// The flight recorder: the last collectives of each rank with their times, to be read when a rank
// was lost or hangs.

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "moesh/comm/group.h"

namespace moesh::comm::flight {

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
