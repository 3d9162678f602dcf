// The simulator against formulas that were published for each schedule, and against lists that do
// not work.

#include "moesh/pipeline/simulate.h"

#include <algorithm>
#include <map>

#include "tests/pipeline/support.h"

namespace moesh::pipeline {
namespace {

using enum ActionKind;

double most(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

// The bubble between the first start and the last end of each rank, the worst of them: what is left
// where an optimizer step need not wait for all ranks. So the papers on zero bubbles count.
double bubble_fraction_of_worst_rank(const Simulation& s) {
  double worst = 0;
  for (size_t r = 0; r < s.ranks.size(); ++r) {
    const double span = s.ranks[r].back().end - s.ranks[r].front().start;
    if (span > 0) worst = std::max(worst, 1 - s.busy[r] / span);
  }
  return worst;
}

// Forward and each half of backward take 1.
TEST(Simulate, BubblesAreThoseOfTheFormulas) {
  each_case([](const Case& c) {
    const Simulation s = simulate(c.schedule);
    const double p = c.p, v = c.v, m = c.m;
    if (c.name == "gpipe" || c.name == "1f1b")
      for (const double f : {s.bubble_fraction(), bubble_fraction_of_worst_rank(s)})
        EXPECT_NEAR(f, (p - 1) / (m + p - 1), 1e-12);
    if (c.name == "interleaved_1f1b" && m >= p)
      EXPECT_NEAR(s.bubble_fraction(), (p - 1) / (v * m + p - 1), 1e-12);
    // (p - 1) (F + I - W) of time, of 3 m work.
    if (c.name == "zero_bubble" && m >= 2 * p - 1)
      EXPECT_NEAR(s.bubble_fraction(), (p - 1) / (3 * m + p - 1), 1e-12);
    // (p - 1) (pair + B - 3 W) of time; apart, the p - 1 that ranks begin one after the other.
    if (c.name == "dualpipev" && m >= 2 * p)
      EXPECT_NEAR(s.bubble_fraction(),
                  c.is_joined ? (p - 1) / (3 * m + p - 1) : (p - 1) / (6 * m + p - 1), 1e-12);
    // No rank waits once it has begun; they begin one after the other.
    if (c.name == "zbv" && m >= 2 * p - 1) {
      EXPECT_EQ(bubble_fraction_of_worst_rank(s), 0);
      EXPECT_NEAR(s.bubble_fraction(), (p - 1) / (6 * m + p - 1), 1e-12);
    }
  });
}

// In whole stages of a rank: a rank with v of them has activations v times as small.
TEST(Simulate, LiveActivationsAreThoseOfTheFormulas) {
  each_case([](const Case& c) {
    const Simulation s = simulate(c.schedule);
    const int p = c.p, v = c.v, m = c.m;
    for (int r = 0; r < p; ++r) {
      const double peak = s.peak[static_cast<size_t>(r)];
      if (c.name == "gpipe") EXPECT_EQ(peak, m);
      if (c.name == "1f1b") EXPECT_EQ(peak, std::min(m, c.is_joined ? 2 * (p - r) : p - r));
      if (c.name == "dualpipev") EXPECT_LE(peak, 2 * std::min(m, p) + 1);
      if (c.name == "zero_bubble") EXPECT_EQ(peak, std::min(m, p));
      if (c.name == "zbv") EXPECT_LE(peak, 2 * std::min(m, p));
      if (c.name == "interleaved_1f1b" && m % p == 0)
        EXPECT_EQ(peak, std::min(m * v, (v - 1) * p + 2 * (p - 1 - r) + 1 + c.is_joined));
    }
    if (c.name == "zbv") EXPECT_EQ(most(s.peak), 2 * std::min(m, p));
    if (c.name == "dualpipev" && m >= 2 * p) EXPECT_EQ(most(s.peak), 2 * p + 1);
  });
}

// What an evaluation runs: activations are gone with their forward, and few messages lie anywhere.
TEST(Simulate, ForwardsAloneNeedLittle) {
  each_case([](const Case& c) {
    const Schedule f = forwards_of(c.schedule);
    EXPECT_EQ(most(simulate(f).peak), 1);
    const int enough = enough_buffers(f);
    if (c.v == 1) EXPECT_EQ(enough, 1);
    if (c.name == "zbv") EXPECT_LE(enough, 2 * c.p);
    if (c.name == "interleaved_1f1b") EXPECT_LE(enough, 2 * c.p);
    // Enough also where the last stage takes longer than all others.
    Costs costs{.stages = std::vector<StageCosts>(static_cast<size_t>(f.num_stages)),
                .num_buffers = enough};
    costs.stages.back().forward = 10;
    EXPECT_LE(simulate(f, costs).num_buffers, enough);
  });
  Schedule both = forwards_of(one_f_one_b(2, 2));
  both.ranks[1].push_back({backward, 1, 0});
  expect_error([&] { simulate(both); }, {"rank 1: B1.0 is in a schedule that has only forwards"});
}

// Whatever actions take: nothing begins before its input is there, or before the rank is free.
TEST(Simulate, NothingBeginsBeforeItsInput) {
  each_case([](const Case& c) {
    Costs costs;
    for (int stage = 0; stage < c.schedule.num_stages; ++stage)
      costs.stages.push_back({.forward = 1.0 + stage % 3,
                              .backward_input = 2.0 - stage % 2,
                              .backward_weight = 0.5 + stage % 4,
                              .transfer = 0.25 * (stage % 3)});
    const Simulation s = simulate(c.schedule, costs);
    std::map<std::tuple<bool, int, int>, double> ends;  // of forward, and of gradients of inputs
    for (const auto& list : s.ranks)
      for (const Timed& t : list)
        if (t.action.kind != backward_weight)
          ends[{t.action.kind == forward, t.action.stage, t.action.micro_batch}] = t.end;
    for (const auto& list : s.ranks) {
      double free_from = 0;
      bool is_second = false;
      for (const auto& [a, start, end] : list) {
        if (is_second)
          EXPECT_EQ(end, free_from);  // they begin and end together
        else
          EXPECT_GE(start, free_from);
        free_from = end;
        is_second = a.joins_next;
        const int from = a.kind == forward ? a.stage - 1 : a.stage + 1;
        if (a.kind == backward_weight || from < 0 || from == c.schedule.num_stages) continue;
        const bool is_here = c.schedule.rank_of[static_cast<size_t>(from)] ==
                             c.schedule.rank_of[static_cast<size_t>(a.stage)];
        const double arrives = ends.at({a.kind == forward, from, a.micro_batch}) +
                               (is_here ? 0 : costs.of(std::min(from, a.stage)).transfer);
        EXPECT_GE(start, arrives - 1e-12) << to_string(a);
      }
    }
  });
}

// One buffer in each direction between two ranks is enough, but where stages come round, and where
// a rank is two micro-batches ahead of the next.
int least_buffers(const Case& c) {
  return c.name == "interleaved_1f1b" ? 2 + c.m % c.p : c.name == "1f1b" && c.is_joined ? 2 : 1;
}

TEST(Simulate, NoneDeadlocksWithFewBuffers) {
  each_case([](const Case& c) {
    Costs costs{.stages = {{}}, .num_buffers = least_buffers(c)};
    ASSERT_NO_THROW(simulate(c.schedule, costs));
    EXPECT_LE(simulate(c.schedule, costs).num_buffers, costs.num_buffers);
  });
  expect_error([] { simulate(interleaved_1f1b(4, 2, 8), {.stages = {{}}, .num_buffers = 1}); },
               "wait for each other: rank 0 before F4.0 for a free buffer");
}

TEST(Simulate, ThreeBuffersNeverSlowThemDown) {
  each_case([](const Case& c) {
    if (c.m % c.p != 0) return;
    EXPECT_EQ(simulate(c.schedule, {.stages = {{}}, .num_buffers = 3}).time,
              simulate(c.schedule).time);
  });
}

TEST(Simulate, FindsRanksThatWaitForEachOther) {
  Schedule s = one_f_one_b(2, 2);
  // Rank 0 wants the gradient of a forward that rank 1 runs only after it got the next one.
  s.ranks[0] = {{forward, 0, 0}, {backward, 0, 0}, {forward, 0, 1}, {backward, 0, 1}};
  s.ranks[1] = {{forward, 1, 0}, {forward, 1, 1}, {backward, 1, 0}, {backward, 1, 1}};
  expect_error([&] { simulate(s); },
               "wait for each other: rank 0 before B0.0 for its input, rank 1 before F1.1 for its "
               "input");
}

// 1F1B that runs no further ahead: the forward of one pair waits for the other pair, whose backward
// waits for the first.
TEST(Simulate, FindsJoinedActionsThatWaitForEachOther) {
  Schedule s = one_f_one_b(2, 3);
  s.ranks[0] = {{forward, 0, 0},       {forward, 0, 1, true}, {backward, 0, 0},
                {forward, 0, 2, true}, {backward, 0, 1},      {backward, 0, 2}};
  s.ranks[1] = {{forward, 1, 0},       {forward, 1, 1, true}, {backward, 1, 0},
                {forward, 1, 2, true}, {backward, 1, 1},      {backward, 1, 2}};
  expect_error([&] { simulate(s); },
               "wait for each other: rank 0 before B0.0 for its input, rank 1 before F1.1 for its "
               "input");
  EXPECT_NO_THROW(simulate(one_f_one_b(2, 3, true)));
}

// A rank that has both computes one while it waits for rows of the other.
TEST(Simulate, JoinedActionsHideTheirLinks) {
  const auto together = [](const StageCosts& c) {
    return time_together({forward, 0, 1}, {backward, 0, 0}, {.stages = {c}});
  };
  const StageCosts some{.forward = 3,
                        .backward_input = 4,
                        .backward_weight = 2,
                        .forward_links = 1,
                        .backward_links = 1.5};
  EXPECT_EQ(together(some), 3 + 4 + 2 - 2.5);
  EXPECT_EQ(time_together({forward, 0, 1}, {backward_input, 0, 0}, {.stages = {some}}),
            3 + 4 - 2.5);
  // Rows of both go over the same links.
  EXPECT_EQ(together({.forward = 3,
                      .backward_input = 4,
                      .backward_weight = 1,
                      .forward_links = 2.5,
                      .backward_links = 3.5}),
            2.5 + 3.5);
  // The forward computes too little to hide the rows of the backward, which itself could hide more.
  EXPECT_EQ(together({.forward = 4,
                      .backward_input = 6,
                      .backward_weight = 2,
                      .forward_links = 3,
                      .backward_links = 3}),
            1 + 5 + 2);
  // And none is done before it would be by itself.
  EXPECT_EQ(
      together({.forward = 10, .backward_input = 1, .backward_weight = 1, .forward_links = 8}), 10);
  const Simulation s = simulate(one_f_one_b(1, 3, true), {.stages = {some}});
  EXPECT_EQ(s.time, 3 + 2 * 6.5 + 6);
  EXPECT_EQ(s.busy[0], s.time);
  EXPECT_EQ(simulate(one_f_one_b(1, 3), {.stages = {some}}).time, 3 * 9);
}

TEST(Simulate, FindsMessagesInAnotherOrder) {
  Schedule s = gpipe(2, 2);
  std::swap(s.ranks[1][0], s.ranks[1][1]);
  expect_error([&] { simulate(s); },
               "rank 0 sends what F0.0 gives as its message 0 to rank 1, which takes it for F1.1");
}

TEST(Simulate, KeepsWhatWeightsNeed) {
  const auto peak = [](double kept) {
    return most(simulate(zero_bubble(4, 8), {.stages = {{.kept_for_weights = kept}}}).peak);
  };
  EXPECT_EQ(peak(1), 4);
  EXPECT_EQ(peak(0), 4);  // of the first rank, which puts off nothing
  const auto last = simulate(zero_bubble(4, 8), {.stages = {{.kept_for_weights = 0.5}}}).peak[3];
  EXPECT_EQ(last, 1 + 3 * 0.5);
  // With recompute a half for the inputs keeps more than forward: the peak is after it.
  const auto more = simulate(zero_bubble(4, 8), {.stages = {{.kept_for_weights = 5}}}).peak;
  EXPECT_EQ(more[3], 4 * 5);
}

TEST(Simulate, CountsMessagesBetweenTwoRanks) {
  // Four are sent before the first has arrived.
  EXPECT_EQ(simulate(gpipe(2, 4), {.stages = {{.transfer = 5}}}).num_buffers, 4);
  // The second rank takes one every 3, and the first makes one every 1.
  EXPECT_EQ(simulate(gpipe(2, 4), {.stages = {{.forward = 1}, {.forward = 3}}}).num_buffers, 3);
  EXPECT_EQ(simulate(gpipe(2, 4)).num_buffers, 1);
  EXPECT_EQ(simulate(gpipe(1, 4)).num_buffers, 0);
}

// Forward and backward of two ranks, one after the other: half of each rank's time is a bubble.
TEST(Simulate, MeasuresInEveryUnit) {
  const StageCosts part{
      .forward = 0.25, .backward_input = 0.125, .backward_weight = 0.125, .activation = 0.5};
  const Simulation s = simulate(gpipe(2, 1), {.stages = {part}});
  EXPECT_EQ(s.time, 1);
  EXPECT_EQ(s.bubble_fraction(), 0.5);
  EXPECT_EQ(bubble_fraction_of_worst_rank(s), 0.5);
  EXPECT_EQ(s.peak, (std::vector<double>{0.5, 0.5}));
  const StageCosts nothing{.forward = 0, .backward_input = 0, .backward_weight = 0};
  const Simulation none = simulate(gpipe(2, 1), {.stages = {nothing}});
  EXPECT_EQ(none.bubble_fraction(), 0);
  EXPECT_EQ(bubble_fraction_of_worst_rank(none), 0);
}

// There and back, over each link once.
TEST(Simulate, WaitsForEachLinkByItself) {
  Costs costs{.stages = {{}, {}, {}}};
  EXPECT_EQ(simulate(gpipe(3, 1), costs).time, 3 + 6);
  costs.stages[0].transfer = 10, costs.stages[1].transfer = 100, costs.stages[2].transfer = 1000;
  EXPECT_EQ(simulate(gpipe(3, 1), costs).time, 3 + 6 + 2 * 110);
}

TEST(Simulate, ChecksItsCosts) {
  EXPECT_THROW(simulate(gpipe(2, 2), {.stages = {{}, {}, {}}}), Error);
  EXPECT_THROW(simulate(gpipe(2, 2), {.stages = {{}}, .num_buffers = 0}), Error);
  EXPECT_THROW(simulate(gpipe(2, 2), {.stages = {{.forward_links = 1.5}}}), Error);
  EXPECT_THROW(simulate(gpipe(2, 2), {.stages = {{.backward_links = 1.5}}}), Error);
}

}  // namespace
}  // namespace moesh::pipeline
