#pragma once
// A record of the work of a rank's thread, while a trace is taken: steps, sections,
// operators and collectives. Nobody does most of the time, and then a hook is a look at a pointer.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/base/scoped_value.h"
#include "moesh/base/this_thread.h"

namespace moesh {

enum class SliceKind : std::uint8_t {
  step,
  section,  // see sections.h
  scope,    // a part of the model or of a step that its author gave a name
  op,       // an operator of LibTorch
  collective
};

/// From when to when something was going on. Times are nanoseconds of the steady clock, which all
/// processes of a machine have in common.
struct Slice {
  SliceKind kind = SliceKind::op;
  std::int64_t name = 0;  // its place in `names`
  std::int64_t begin = 0, end = 0;
  std::int64_t collective = -1;  // its place in `collectives`
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
};

struct TimelineRecord {
  std::vector<std::string> names;
  std::vector<TimelineGroup> groups;
  std::vector<Slice> slices;  // in the order of their beginnings: what is inside comes later
  std::vector<CollectiveSpan> collectives;
};

/// While it lives, records what this thread tells it.
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
  std::int64_t innermost() const { return open_.empty() ? -1 : open_.back(); }
  std::int64_t number_of(std::string_view name);
  std::int64_t group_of(const std::string& name, const std::vector<int>& members,
                        bool meets_on_host);

  TimelineRecord record_;
  std::map<std::string, std::int64_t, std::less<>> numbers_;  // of names
  std::vector<std::int64_t> open_;                            // slices, the innermost last
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

}  // namespace moesh
