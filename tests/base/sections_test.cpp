#include "moesh/base/timeline.h"

#include <gtest/gtest.h>

#include <thread>

namespace moesh {
namespace {

using Clock = SectionClock::Clock;

void spend(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Sleeping takes at least as long as it is asked to: bounds from below, and the sum is the whole.
TEST(Sections, EveryMomentBelongsToOne) {
  const auto begin = Clock::now();
  SectionClock clock(begin);
  {
    const InSection forward(Section::forward);
    spend(0.01);
    {
      const InSection waiting(Section::waiting);
      spend(0.02);
    }
    spend(0.01);
  }
  spend(0.005);
  const SectionTimes times = clock.take();
  const double all = std::chrono::duration<double>(Clock::now() - begin).count();
  EXPECT_GE(times[Section::forward], 0.02);
  EXPECT_GE(times[Section::waiting], 0.02);
  EXPECT_GE(times[Section::other], 0.005);
  EXPECT_EQ(times[Section::backward], 0);
  EXPECT_LE(times.of_step(), all);
  EXPECT_GE(times.of_step(), 0.045);
  EXPECT_EQ(clock.take()[Section::forward], 0) << "it was taken";
}

TEST(Sections, ValidationAndSavingAreNoneOfAStep) {
  SectionClock clock;
  {
    const InSection saving(Section::saving);
    const InSection waiting(Section::waiting);
    spend(0.05);
  }
  const SectionTimes times = clock.take();
  EXPECT_GE(times[Section::saving], 0.05);
  EXPECT_EQ(times[Section::waiting], 0) << "what waits while it saves is saving";
  EXPECT_LT(times.of_step(), times[Section::saving]);
}

TEST(Sections, WithoutAClockNothingIsMeasured) {
  const InSection forward(Section::forward);
  SectionClock clock;  // begins within a scope that it knows nothing of
  EXPECT_EQ(clock.take()[Section::forward], 0);
  std::thread([] { const InSection elsewhere(Section::backward); }).join();
  EXPECT_EQ(clock.take()[Section::backward], 0);
}

}  // namespace
}  // namespace moesh
