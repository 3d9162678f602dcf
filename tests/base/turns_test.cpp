#include "moesh/base/turns.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

#include "moesh/base/log.h"
#include "moesh/base/this_thread.h"
#include "moesh/base/timeline.h"

namespace moesh {
namespace {

using Work = std::vector<std::function<void()>>;

// A letter for each turn.
TEST(Turns, GoRoundInOrderWhateverTimeAnythingTakes) {
  std::string done;
  const auto work = [&](char name, int num_turns, int milliseconds) {
    return [&done, name, num_turns, milliseconds] {
      for (int i = 0; i < num_turns; ++i) {
        if (i > 0) next_turn();
        std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
        done += name;
      }
    };
  };
  take_turns({work('a', 3, 5), work('b', 5, 0), work('c', 1, 2)});
  EXPECT_EQ(done, "abcababbb");
}

TEST(Turns, TheFirstIsInThisThreadAndOneRunsAtATime) {
  const auto here = std::this_thread::get_id();
  int num_running = 0;
  const auto work = [&](bool is_first) {
    return [&, is_first] {
      EXPECT_EQ(std::this_thread::get_id() == here, is_first);
      for (int i = 0; i < 200; ++i) {
        EXPECT_EQ(++num_running, 1);
        --num_running;
        next_turn();
      }
    };
  };
  take_turns({work(true), work(false), work(false)});
}

// What a library keeps for a thread.
struct KeptByThread {
  KeptByThread() { ++num_made; }
  ~KeptByThread() { ++num_freed; }
  int num_uses = 0;
  static inline std::atomic<int> num_made = 0, num_freed = 0;
};
thread_local KeptByThread kept_by_thread;

// It is still there the next time, and goes with the thread for which the others work.
TEST(Turns, TheOthersHaveTheirThreadsAgainTheNextTime) {
  KeptByThread::num_made = KeptByThread::num_freed = 0;
  std::thread([] {
    for (int time = 1; time <= 3; ++time)
      take_turns(Work(3, [time] { EXPECT_EQ(++kept_by_thread.num_uses, time); }));
    take_turns(Work(2, [] { EXPECT_EQ(++kept_by_thread.num_uses, 4); }));
    EXPECT_EQ(KeptByThread::num_freed, 0);
  }).join();
  EXPECT_EQ(KeptByThread::num_made, 3);
  EXPECT_EQ(KeptByThread::num_freed, 3);
}

TEST(Turns, OutsideOfThemNothingHappens) {
  next_turn();
  take_turns({[] { next_turn(); }});
}

TEST(Turns, ThreadsWorkForTheSameRankAndCanBeInterrupted) {
  const int before = log_rank();
  set_log_rank(7);
  const std::atomic<bool> is_unwanted = true;
  const Interruptible interruptible(&is_unwanted);
  int rank = -1;
  EXPECT_THROW(take_turns({[] { next_turn(); },
                           [&] {
                             rank = log_rank();
                             interruption_point();
                           }}),
               Error);
  EXPECT_EQ(rank, 7);
  set_log_rank(before);
}

// The first fault is thrown, and whoever waits for a turn is unwound.
TEST(Turns, AFaultEndsTheOthers) {
  for (const bool of_first : {true, false}) {
    int num_unwound = 0, num_finished = 0;
    struct Counts {
      int& count;
      ~Counts() { ++count; }
    };
    const auto fails = [] {
      next_turn();
      throw Error(ErrorKind::data, "it went wrong");
    };
    const auto goes_on = [&] {
      const Counts unwound{num_unwound};
      for (int i = 0; i < 5; ++i) next_turn();
      ++num_finished;
    };
    try {
      take_turns(of_first ? Work{fails, goes_on} : Work{goes_on, fails});
      FAIL() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_STREQ(e.what(), "it went wrong");
    }
    EXPECT_EQ(num_unwound, 1);
    EXPECT_EQ(num_finished, 0);
  }
  // Before the other one has begun.
  bool has_begun = false;
  EXPECT_THROW(
      take_turns({[] { throw Error(ErrorKind::data, "at once"); }, [&] { has_begun = true; }}),
      Error);
  EXPECT_FALSE(has_begun);
}

// Each is in the section that it was in when it passed its turn on.
TEST(Turns, KeepTheirSections) {
  const auto spend = [] { std::this_thread::sleep_for(std::chrono::milliseconds(10)); };
  SectionClock clock;
  {
    const InSection update(Section::update);
    take_turns({[&] {
                  const InSection forward(Section::forward);
                  next_turn();
                  spend();
                },
                [&] {
                  const InSection backward(Section::backward);
                  next_turn();
                  spend();
                  spend();
                }});
    spend();
  }
  const SectionTimes times = clock.take();
  EXPECT_GE(times[Section::forward], 0.01);
  EXPECT_GE(times[Section::backward], 0.02);
  EXPECT_GE(times[Section::update], 0.01);
  EXPECT_EQ(times[Section::waiting], 0);
}

}  // namespace
}  // namespace moesh
