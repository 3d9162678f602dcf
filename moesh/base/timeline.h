#pragma once
// A record of the work of a rank's thread, while a trace is taken: steps, sections,
// operators and collectives. Nobody does most of the time, and then a hook is a look at a pointer.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/base/this_thread.h"

namespace moesh {

/// Seconds that have passed.
inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The scope in which the host waits for counts of rows, by which it makes what rows come into.
inline constexpr char kReadCounts[] = "read the counts of rows";

enum class SliceKind : std::uint8_t {
  step,
  section,  // see Section
  scope,    // a part of the model or of a step that its author gave a name
  op,       // an operator of LibTorch
  collective,
  turn,  // the rank's other piece of work goes on (turns.h)
};

/// From when to when something was going on. Times are nanoseconds of the steady clock, which all
/// processes of a machine have in common.
struct Slice {
  SliceKind kind = SliceKind::op;
  std::int64_t name = 0;  // its place in `names`
  std::int64_t begin = 0, end = 0;
  std::int64_t collective = -1;  // its place in `collectives`
  std::int64_t lane = 0;         // which of the rank's pieces of work (turns.h); 0: the first
};

/// Ranks that meet in a collective.
struct TimelineGroup {
  std::string name;           // "tp", "dp_shard|cp"
  std::vector<int> members;   // world ranks
  bool meets_on_host = true;  // else on the device, which the host does not wait for
};

/// A collective as one rank saw it. It may go on beside other work: from `begin`, when the rank
/// called it, to `end`; the rank itself waits from `wait_begin` on.
struct CollectiveSpan {
  std::int64_t op = 0;     // its place in `names`
  std::int64_t group = 0;  // in `groups`
  std::int64_t bytes = 0;  // of this rank's input
  std::int64_t begin = 0, wait_begin = 0, end = 0;
  std::int64_t scope = -1;  // in `names`: the innermost scope in which it was called
  std::int64_t lane = 0;    // as that of a Slice
};

struct TimelineRecord {
  std::vector<std::string> names;
  std::vector<TimelineGroup> groups;
  // In the order of their beginnings: what is inside comes later, in the same lane.
  std::vector<Slice> slices;
  std::vector<CollectiveSpan> collectives;
};

/// While it lives, records what this thread tells it, and those that take turns with it.
class Timeline {
 public:
  Timeline();

  /// That of this thread; null if nothing is recorded.
  static Timeline* current() { return this_thread.timeline; }

  /// A slice begins; those that began in it must end before it. Returns its number.
  std::int64_t open(SliceKind kind, std::string_view name);
  void close(std::int64_t slice);

  /// A collective is called, and returns its number; it is going on, and the rank does other
  /// things; the rank waits for it; it has ended.
  std::int64_t call(std::string_view op, const std::string& group, const std::vector<int>& members,
                    bool meets_on_host, std::int64_t bytes);
  void started(std::int64_t collective);
  void wait(std::int64_t collective);
  void ended(std::int64_t collective);

  /// The record. Open slices end now.
  TimelineRecord take();

 private:
  struct Called {
    std::int64_t slice, parent;  // in which the call was made; -1: in none
  };
  // The open slices of the lane whose turn it is, the innermost last.
  std::vector<std::int64_t>& open_here();
  std::int64_t innermost() { return open_here().empty() ? -1 : open_here().back(); }
  std::int64_t number_of(std::string_view name);
  std::int64_t group_of(const std::string& name, const std::vector<int>& members,
                        bool meets_on_host);

  TimelineRecord record_;
  std::map<std::string, std::int64_t, std::less<>> numbers_;  // of names
  std::vector<std::vector<std::int64_t>> open_;               // by lane
  std::vector<Called> called_;                                // by collective
  ScopedValue<Timeline*> scope_;
};

/// The time of its scope is a slice, while a trace is recorded.
class InSlice {
 public:
  InSlice(SliceKind kind, std::string_view name) : timeline_(Timeline::current()) {
    if (timeline_) slice_ = timeline_->open(kind, name);
  }
  ~InSlice() {
    if (timeline_) timeline_->close(slice_);
  }
  InSlice(const InSlice&) = delete;
  InSlice& operator=(const InSlice&) = delete;

 private:
  Timeline* timeline_;
  std::int64_t slice_ = 0;
};

// Where the time of a step goes: the host of one rank, section by section.

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
