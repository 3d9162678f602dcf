#pragma once
// Where the time of a step goes: the host of one rank, section by section.

#include <array>
#include <chrono>
#include <cstddef>

#include "moesh/base/timeline.h"

namespace moesh {

/// The sections of a step on the host. The time of a step is the sum of those before `validation`;
/// the last two are time between the steps.
enum class Section {
  data,  // waits for the batches, and hands them to the device
  forward,
  backward,
  reduce,   // sums over ranks, without the wait for them
  update,   // gradient norm, optimizer, expert bias
  waiting,  // for other ranks, or for the device
  other,    // the loop itself, and metrics
  validation,
  saving,
};
constexpr std::size_t kNumSections = 9;
const char* to_string(Section section);

constexpr bool is_in_step(Section section) { return section < Section::validation; }

/// Seconds, by section.
struct SectionTimes {
  std::array<double, kNumSections> seconds{};

  double& operator[](Section s) { return seconds[static_cast<std::size_t>(s)]; }
  double operator[](Section s) const { return seconds[static_cast<std::size_t>(s)]; }
  /// The sum of the sections that belong to a step.
  double of_step() const;
};

/// While it lives, every moment of this thread belongs to one section: to `other` outside of all.
class SectionClock {
 public:
  using Clock = std::chrono::steady_clock;
  explicit SectionClock(Clock::time_point start = Clock::now());

  /// The time since the last call, or since the start.
  SectionTimes take();

  /// For what goes to and fro between sections by itself: InSection is for the rest.
  Section current() const { return current_; }
  void enter(Section section);

 private:
  friend class InSection;

  SectionTimes times_;
  Section current_ = Section::other;
  Clock::time_point since_;
  ScopedValue<SectionClock*> scope_;
};

/// The time of its scope belongs to a section, and no longer to the one around it. In `validation`
/// and `saving` nothing changes: their time does not belong to a step. Without a clock nothing is
/// summed up. While a trace is recorded, the scope is a slice.
class InSection {
 public:
  explicit InSection(Section section);
  ~InSection();
  InSection(const InSection&) = delete;
  InSection& operator=(const InSection&) = delete;

 private:
  InSlice slice_;
  SectionClock* clock_;
  Section before_ = Section::other;
};

}  // namespace moesh
