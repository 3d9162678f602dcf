#pragma once
// State of a thread, used deep within calls that do not pass it on: by log
// lines, slices of a timeline, sections of a step, and points where work may end early.

#include <atomic>
#include <cstddef>

namespace moesh {

class SectionClock;
class Timeline;
class Turns;

struct ThisThread {
  int rank = -1;                                   // that log lines name; -1: none
  SectionClock* clock = nullptr;                   // of sections.h
  Timeline* timeline = nullptr;                    // null if nothing is recorded
  const std::atomic<bool>* is_unwanted = nullptr;  // of interrupt.h
  Turns* turns = nullptr;                          // of turns.h; null: it takes none
  std::size_t place = 0;                           // among those that take turns
};
inline constinit thread_local ThisThread this_thread;  // no call to look at it

}  // namespace moesh
