// The executor, with ranks as threads. Messages carry the clock of their sender, so that the time
// which a schedule takes is known without a wait; and once with actions that sleep.

#include "moesh/pipeline/execute.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "moesh/base/error.h"
#include "moesh/pipeline/simulate.h"

namespace moesh::pipeline {
namespace {

using enum ActionKind;
using Label = std::tuple<bool, int, int>;  // a gradient, for this stage, of this micro-batch

// What lies between all ranks.
struct Post {
  struct Letter {
    Label label;
    double sent = 0;                   // when it can be there
    std::optional<double> taken = {};  // when the action that takes it began
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<int, int>, std::deque<Letter>> letters;  // by sender and receiver

  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, Ready ready) {
    ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(60), ready)) << "the ranks are stuck";
  }
};

class TimedActor : public Actor {
 public:
  TimedActor(const Schedule& s, int rank, const Costs& costs, Post& post)
      : s_(s), rank_(rank), costs_(costs), post_(post) {}

  void start_receive(const Action& taker, int from) override {
    arriving_[label(taker)] = {from, num_received_[from]++};
  }
  void run(const Action& a) override {
    take(a);
    work(a);
    give(a);
  }
  void run_together(const Action& a, const Action& b) override {
    take(a), take(b);
    clock += time_together(a, b, costs_);
    give(a), give(b);
  }
  void start_send(const Action& maker, int to) override {
    const std::lock_guard lock(post_.mutex);
    auto& line = post_.letters[{rank_, to}];
    sent_[{maker.kind != forward, maker.stage, maker.micro_batch}] = {to, line.size()};
    line.push_back({{maker.kind != forward, *s_.target(maker), maker.micro_batch},
                    clock + costs_.of(std::min(maker.stage, *s_.target(maker))).transfer});
    int num_under_way = 0;  // of this kind
    for (const auto& letter : line)
      num_under_way += !letter.taken && std::get<0>(letter.label) == (maker.kind != forward);
    EXPECT_LE(num_under_way, costs_.num_buffers) << "rank " << rank_ << ", " << to_string(maker);
    post_.changed.notify_all();
  }
  void finish_send(const Action& maker) override {
    const auto [to, number] = sent_.at({maker.kind != forward, maker.stage, maker.micro_batch});
    std::unique_lock lock(post_.mutex);
    const auto& line = post_.letters[{rank_, to}];
    post_.wait(lock, [&, n = number] { return line[n].taken.has_value(); });
    if (log.size() < s_.ranks[static_cast<size_t>(rank_)].size())  // at the end nobody asks
      clock = std::max(clock, *line[number].taken);
  }

  std::vector<Action> log;
  double clock = 0;

 protected:
  virtual void work(const Action& a) { clock += cost(a); }
  double cost(const Action& a) const {
    const StageCosts& c = costs_.of(a.stage);
    return a.kind == forward          ? c.forward
           : a.kind == backward       ? c.backward_input + c.backward_weight
           : a.kind == backward_input ? c.backward_input
                                      : c.backward_weight;
  }

 private:
  static Label label(const Action& taker) {
    return {taker.kind != forward, taker.stage, taker.micro_batch};
  }
  void take(const Action& a) {
    log.push_back(a);
    const auto from = s_.source(a);
    if (from && s_.rank_with(*from) == rank_) {
      EXPECT_EQ(here_.erase(label(a)), 1u)
          << "rank " << rank_ << " has no input of " << to_string(a);
    } else if (from) {
      receive(a);
    }
  }
  void give(const Action& a) {
    const auto to = s_.target(a);
    if (to && s_.rank_with(*to) == rank_) here_.emplace(a.kind != forward, *to, a.micro_batch);
  }
  void receive(const Action& a) {
    ASSERT_TRUE(arriving_.contains(label(a))) << to_string(a) << " was not asked for in time";
    const auto [from, number] = arriving_.at(label(a));
    std::unique_lock lock(post_.mutex);
    auto& line = post_.letters[{from, rank_}];
    post_.wait(lock, [&, n = number] { return line.size() > n; });
    EXPECT_EQ(line[number].label, label(a)) << "rank " << rank_ << ", " << to_string(a);
    clock = std::max(clock, line[number].sent);
    line[number].taken = clock;
    post_.changed.notify_all();
  }

  const Schedule& s_;
  int rank_;
  const Costs& costs_;
  Post& post_;
  std::map<int, size_t> num_received_;
  std::map<Label, std::pair<int, size_t>> arriving_, sent_;
  std::set<Label> here_;
};

class SleepingActor final : public TimedActor {
 public:
  using TimedActor::TimedActor;
  void work(const Action& a) override {
    std::this_thread::sleep_for(std::chrono::duration<double>(cost(a)));
  }
};

template <class A>
std::vector<std::unique_ptr<A>> run_all(const Schedule& s, const Costs& costs) {
  Post post;
  std::vector<std::unique_ptr<A>> actors;
  std::vector<std::thread> threads;
  for (int r = 0; r < s.num_ranks(); ++r) actors.push_back(std::make_unique<A>(s, r, costs, post));
  for (int r = 0; r < s.num_ranks(); ++r)
    threads.emplace_back([&, r] {
      execute(s, r, *actors[static_cast<size_t>(r)], {.num_buffers = costs.num_buffers});
    });
  for (auto& t : threads) t.join();
  return actors;
}

std::vector<Schedule> schedules(int p, int m) {
  std::vector<Schedule> all;
  for (const std::string& name : schedule_names()) {
    const int v = stages_of_a_rank(name);
    for (const bool is_joined : {false, true}) {
      if (is_joined && !can_be_joined(name)) continue;
      all.push_back(make_schedule(name, p, v == 0 ? 2 : v, m, is_joined));
      if (v == 0) all.push_back(make_schedule(name, p, 3, m, is_joined));
    }
  }
  return all;
}

TEST(Execute, TakesTheTimeThatTheSimulatorSays) {
  for (int p = 1; p <= 5; ++p)
    for (int m = 1; m <= 9; m += 2)
      for (const Schedule& s : schedules(p, m)) {
        Costs costs;
        for (int stage = 0; stage < s.num_stages; ++stage)
          costs.stages.push_back({.forward = 1,
                                  .backward_input = 1.25,
                                  .backward_weight = 0.75,
                                  .forward_links = 0.25 * (stage % 2),
                                  .backward_links = 0.5,
                                  .transfer = 0.125 * (1 + stage % 3)});
        // And with no more messages under way than it needs.
        for (const bool is_bounded : {false, true}) {
          if (is_bounded) costs.num_buffers = enough_buffers(s);
          const Simulation expected = simulate(s, costs);
          const auto actors = run_all<TimedActor>(s, costs);
          for (size_t r = 0; r < actors.size(); ++r) {
            EXPECT_EQ(actors[r]->log, s.ranks[r]);
            EXPECT_NEAR(actors[r]->clock, expected.ranks[r].back().end, 1e-9)
                << "p " << p << " m " << m << " rank " << r << " bounded " << is_bounded;
          }
        }
      }
}

TEST(Execute, RunsForwardsAlone) {
  for (const Schedule& s : schedules(4, 6)) {
    const Schedule f = forwards_of(s);
    const Costs costs{.stages = {{}}, .num_buffers = enough_buffers(f)};
    const auto actors = run_all<TimedActor>(f, costs);
    for (size_t r = 0; r < actors.size(); ++r) EXPECT_EQ(actors[r]->log, f.ranks[r]);
  }
}

// A machine with other work may be late; it is never early.
TEST(Execute, WithActionsThatSleepIsWithinTenPercentOfTheSimulator) {
  const Costs costs{
      .stages = {{.forward = 0.020, .backward_input = 0.025, .backward_weight = 0.015}}};
  for (const Schedule& s : {one_f_one_b(4, 6), zbv(3, 6)}) {
    const double expected = simulate(s, costs).time;
    double best = 1e9;
    for (int i = 0; i < 8 && best > 1.1 * expected; ++i) {
      const auto start = std::chrono::steady_clock::now();
      run_all<SleepingActor>(s, costs);
      best = std::min(
          best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    EXPECT_GE(best, 0.999 * expected);
    EXPECT_LE(best, 1.1 * expected);
  }
}

// What it is told to do, in order.
class WritingActor final : public Actor {
 public:
  void start_receive(const Action& taker, int) override { text += "<" + to_string(taker) + " "; }
  void run(const Action& a) override { text += to_string(a) + " "; }
  void start_send(const Action& maker, int) override { text += ">" + to_string(maker) + " "; }
  void finish_send(const Action& maker) override { text += "." + to_string(maker) + " "; }
  std::string text;
};

// A message is asked for one taker ahead: it travels while the action before that one runs. A send
// ends when its buffer is wanted.
TEST(Execute, AsksForAMessageOneActionAhead) {
  const auto text = [](const Schedule& s, int rank) {
    WritingActor actor;
    execute(s, rank, actor, {.num_buffers = 2});
    return actor.text;
  };
  EXPECT_EQ(text(gpipe(2, 3), 1),
            "<F1.0 <F1.1 F1.0 <F1.2 F1.1 F1.2 B1.0 >B1.0 B1.1 >B1.1 .B1.0 B1.2 >B1.2 .B1.1 .B1.2 ");
  EXPECT_EQ(text(gpipe(2, 3), 0),
            "<B0.0 <B0.1 F0.0 >F0.0 F0.1 >F0.1 .F0.0 F0.2 >F0.2 B0.0 <B0.2 B0.1 B0.2 .F0.1 .F0.2 ");
}

// Before two that are joined, what both of the next two take as well; what they give goes together.
TEST(Execute, AsksForTheMessagesOfJoinedActionsTogether) {
  WritingActor actor;
  execute(one_f_one_b(3, 4, true), 1, actor, {.num_buffers = 2});
  EXPECT_EQ(actor.text,
            "<F1.0 <F1.1 F1.0 >F1.0 <F1.2 F1.1 >F1.1 <F1.3 .F1.0 F1.2 >F1.2 <B1.0 <B1.1 <B1.2 "
            ".F1.1 F1.3 B1.0 >F1.3 >B1.0 B1.1 >B1.1 <B1.3 .B1.0 B1.2 >B1.2 .B1.1 B1.3 >B1.3 .B1.2 "
            ".B1.3 .F1.2 .F1.3 ");
}

class FailingActor final : public Actor {
 public:
  void start_receive(const Action&, int) override {}
  void run(const Action& a) override {
    MOESH_CHECK(a.kind == forward || a.micro_batch < 1, ErrorKind::comm, "rank 3 has left");
  }
  void start_send(const Action&, int) override {}
  void finish_send(const Action&) override {}
};

TEST(Execute, AnErrorNamesTheActionThatItWasIn) {
  FailingActor actor;
  try {
    execute(one_f_one_b(2, 3), 1, actor);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::comm);
    EXPECT_STREQ(e.what(), "rank 1 of pp, backward of stage 1 for micro-batch 1: rank 3 has left");
  }
  try {
    execute(one_f_one_b(2, 5, true), 1, actor);
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(
        e.what(),
        "rank 1 of pp, forward of stage 1 for micro-batch 2 beside backward of stage 1 for "
        "micro-batch 1: rank 3 has left");
  }
  // With one rank there is nothing to add to the message.
  EXPECT_THROW(
      try { execute(one_f_one_b(1, 3), 0, actor); } catch (const Error& e) {
        EXPECT_STREQ(e.what(), "rank 3 has left");
        throw;
      },
      Error);
}

}  // namespace
}  // namespace moesh::pipeline
