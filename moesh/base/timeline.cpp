#include "moesh/base/timeline.h"

#include <chrono>
#include <utility>

#include "moesh/base/error.h"

namespace moesh {
namespace {

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Timeline::Timeline() : scope_(this_thread.timeline, this) {}

std::vector<std::int64_t>& Timeline::open_here() {
  if (open_.size() <= this_thread.place) open_.resize(this_thread.place + 1);
  return open_[this_thread.place];
}

std::int64_t Timeline::number_of(std::string_view name) {
  if (const auto found = numbers_.find(name); found != numbers_.end()) return found->second;
  const auto number = static_cast<std::int64_t>(record_.names.size());
  record_.names.emplace_back(name);
  numbers_.emplace(name, number);
  return number;
}

std::int64_t Timeline::group_of(const std::string& name, const std::vector<int>& members,
                                bool meets_on_host) {
  for (std::size_t i = 0; i < record_.groups.size(); ++i)
    if (record_.groups[i].name == name && record_.groups[i].members == members)
      return static_cast<std::int64_t>(i);
  record_.groups.push_back({name, members, meets_on_host});
  return static_cast<std::int64_t>(record_.groups.size()) - 1;
}

std::int64_t Timeline::open(SliceKind kind, std::string_view name) {
  const auto slice = static_cast<std::int64_t>(record_.slices.size());
  record_.slices.push_back({.kind = kind,
                            .name = number_of(name),
                            .lane = static_cast<std::int64_t>(this_thread.place)});
  open_here().push_back(slice);
  record_.slices.back().begin = now();
  return slice;
}

void Timeline::close(std::int64_t slice) {
  const std::int64_t end = now();
  // An exception leaves scopes that have no chance to say so.
  auto& open = open_here();
  while (!open.empty()) {
    const std::int64_t last = open.back();
    if (last < slice) return;
    open.pop_back();
    record_.slices[static_cast<std::size_t>(last)].end = end;
  }
}

std::int64_t Timeline::call(std::string_view op, const std::string& group,
                            const std::vector<int>& members, bool meets_on_host,
                            std::int64_t bytes) {
  const auto number = static_cast<std::int64_t>(record_.collectives.size());
  CollectiveSpan span{
      .op = number_of(op), .group = group_of(group, members, meets_on_host), .bytes = bytes};
  const auto& open_slices = open_here();
  for (auto i = open_slices.rbegin(); i != open_slices.rend() && span.scope < 0; ++i)
    if (const Slice& s = record_.slices[static_cast<std::size_t>(*i)]; s.kind == SliceKind::scope)
      span.scope = s.name;
  const std::int64_t parent = innermost();
  const std::int64_t slice = open(SliceKind::collective, std::string(op) + " " + group);
  called_.push_back({slice, parent});
  record_.slices[static_cast<std::size_t>(slice)].collective = number;
  span.begin = record_.slices[static_cast<std::size_t>(slice)].begin;
  span.wait_begin = span.begin;
  span.lane = record_.slices[static_cast<std::size_t>(slice)].lane;
  record_.collectives.push_back(span);
  return number;
}

void Timeline::started(std::int64_t collective) {
  close(called_[static_cast<std::size_t>(collective)].slice);
}

void Timeline::wait(std::int64_t collective) {
  CollectiveSpan& span = record_.collectives[static_cast<std::size_t>(collective)];
  const Called& called = called_[static_cast<std::size_t>(collective)];
  Slice& calling = record_.slices[static_cast<std::size_t>(called.slice)];
  const bool is_at_once =
      called.parent == innermost() && record_.slices.back().begin <= calling.end;
  if (is_at_once) {  // nothing was done since the call: one slice
    open_here().push_back(called.slice);
    span.wait_begin = calling.end;
    return;
  }
  const std::string name = record_.names[static_cast<std::size_t>(span.op)] + " " +
                           record_.groups[static_cast<std::size_t>(span.group)].name;
  const std::int64_t slice = open(SliceKind::collective, name);
  record_.slices[static_cast<std::size_t>(slice)].collective = collective;
  span.wait_begin = record_.slices[static_cast<std::size_t>(slice)].begin;
}

void Timeline::ended(std::int64_t collective) {
  const std::int64_t slice = innermost();
  if (slice < 0) return;
  const Slice& s = record_.slices[static_cast<std::size_t>(slice)];
  if (s.collective != collective) return;
  close(slice);
  record_.collectives[static_cast<std::size_t>(collective)].end = s.end;
}

TimelineRecord Timeline::take() {
  if (!open_here().empty()) close(open_here().front());
  for (CollectiveSpan& span : record_.collectives)
    if (span.end == 0) span.end = now();  // it goes on
  numbers_.clear();
  called_.clear();
  return std::exchange(record_, {});
}

const char* to_string(Section section) {
  switch (section) {
    case Section::data: return "data";
    case Section::forward: return "forward";
    case Section::backward: return "backward";
    case Section::reduce: return "reduce";
    case Section::update: return "update";
    case Section::waiting: return "waiting";
    case Section::other: return "other";
    case Section::validation: return "validation";
    case Section::saving: return "saving";
  }
  return "unknown";
}

double SectionTimes::of_step() const {
  double sum = 0;
  for (std::size_t i = 0; i < kNumSections; ++i)
    if (is_in_step(static_cast<Section>(i))) sum += seconds[i];
  return sum;
}

SectionClock::SectionClock(Clock::time_point start)
    : since_(start), scope_(this_thread.clock, this) {}

void SectionClock::enter(Section section) {
  const auto now = Clock::now();
  times_[current_] += std::chrono::duration<double>(now - since_).count();
  since_ = now;
  current_ = section;
}

SectionTimes SectionClock::take() {
  enter(current_);
  const SectionTimes taken = times_;
  times_ = {};
  return taken;
}

InSection::InSection(Section section)
    : slice_(SliceKind::section, to_string(section)), clock_(this_thread.clock) {
  if (clock_ && !is_in_step(clock_->current_)) clock_ = nullptr;
  if (!clock_) return;
  before_ = clock_->current_;
  clock_->enter(section);
}

InSection::~InSection() {
  if (clock_) clock_->enter(before_);
}

}  // namespace moesh
