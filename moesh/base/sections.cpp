#include "moesh/base/sections.h"

namespace moesh {

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
