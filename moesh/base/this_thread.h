#pragma once
// What a thread has that code deep within calls looks at: values that are its own for a while, the
// state of a rank's thread, a flag that ends its work early, and which rank it works for.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "moesh/base/error.h"

namespace moesh {

/// Gives a variable another value for as long as it lives. For what a thread has, which code deep
/// within calls looks at.
template <class T>
class [[nodiscard]] ScopedValue {
 public:
  ScopedValue(T& variable, T value)
      : variable_(variable), outer_(std::exchange(variable, std::move(value))) {}
  ~ScopedValue() { variable_ = std::move(outer_); }
  ScopedValue(const ScopedValue&) = delete;
  ScopedValue& operator=(const ScopedValue&) = delete;

 private:
  T& variable_;
  T outer_;
};

// State of a thread, used deep within calls that do not pass it on: by log
// lines, slices of a timeline, sections of a step, and points where work may end early.

class SectionClock;
class Timeline;
class Turns;

struct ThisThread {
  int rank = -1;                                   // that log lines name; -1: none
  SectionClock* clock = nullptr;                   // of timeline.h
  Timeline* timeline = nullptr;                    // null if nothing is recorded
  const std::atomic<bool>* is_unwanted = nullptr;  // see Interruptible
  Turns* turns = nullptr;                          // of turns.h; null: it takes none
  std::size_t place = 0;                           // among those that take turns
};
inline constinit thread_local ThisThread this_thread;  // no call to look at it

// Work that ends early, because the user no longer wants it: Ctrl-C in Python.

/// While it lives, the interruption points of this thread throw once `is_unwanted` is true. A
/// thread that starts others for the same work hands them `current()`; null: nothing interrupts.
class Interruptible {
 public:
  explicit Interruptible(const std::atomic<bool>* is_unwanted)
      : scope_(this_thread.is_unwanted, is_unwanted) {}

  static const std::atomic<bool>* current() { return this_thread.is_unwanted; }

 private:
  ScopedValue<const std::atomic<bool>*> scope_;
};

/// Where long work may end: before a block of a model, a step, a chunk. Throws Error (internal),
/// which the code that made the thread interruptible catches.
inline void interruption_point() {
  if (const auto* flag = Interruptible::current(); flag && flag->load(std::memory_order_relaxed))
    throw Error(ErrorKind::internal, "interrupted");
}

// Which threads of this process work for which rank: its own, and those that help it, such as the
// thread of a channel. (set_log_rank says so, and every one of them calls it.)

/// What a thread works for: a rank (-1: none), and which of its pieces of work (turns.h).
struct RankLane {
  int rank = -1, lane = 0;
  bool operator==(const RankLane&) const = default;
};

/// From now on and until it ends this thread works for it.
void work_for_rank(int rank, int lane = 0);

/// By the number that the system has for a thread, or by the low 32 bits of its pthread_t, which is
/// what CUPTI has for a thread that no operator ran in; rank -1: unknown.
RankLane rank_of_thread(std::int64_t number);

/// While it lives, threads that have ended are still known.
class KeepRankThreads {
 public:
  KeepRankThreads();
  ~KeepRankThreads();
  KeepRankThreads(const KeepRankThreads&) = delete;
  KeepRankThreads& operator=(const KeepRankThreads&) = delete;
};

}  // namespace moesh
