#pragma once
// What a thread carries with it. It is asked for deep within calls that know nothing of it: by log
// lines, slices of a timeline, sections of a step, and points where work may end early.

#include <atomic>

namespace moesh {

class SectionClock;
class Timeline;

struct ThisThread {
  int rank = -1;                                   // that log lines name; -1: none
  SectionClock* clock = nullptr;                   // of sections.h
  Timeline* timeline = nullptr;                    // null where nobody records
  const std::atomic<bool>* is_unwanted = nullptr;  // of interrupt.h
};
inline constinit thread_local ThisThread this_thread;  // no call to look at it

}  // namespace moesh
