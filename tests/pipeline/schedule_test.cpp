#include "moesh/pipeline/schedule.h"

#include <algorithm>

#include "tests/pipeline/support.h"

namespace moesh::pipeline {
namespace {

using enum ActionKind;

TEST(Schedule, EveryOneIsComplete) {
  int num_cases = 0;
  each_case([&](const Case& c) {
    EXPECT_NO_THROW(check(c.schedule));
    EXPECT_EQ(c.schedule.num_ranks(), c.p);
    EXPECT_EQ(c.schedule.num_stages, c.p * c.v);
    ++num_cases;
  });
  EXPECT_GT(num_cases, 1600);
}

// Joined they do the same, and each rank does the backwards of a stage in the same order.
TEST(Schedule, JoinedItDoesTheSame) {
  each_case([&](const Case& c) {
    if (!c.is_joined) return;
    const Schedule apart = make_schedule(c.name, c.p, c.v, c.m);
    EXPECT_EQ(c.schedule.rank_of, apart.rank_of);
    for (int stage = 0; stage < apart.num_stages; ++stage)
      for (const bool is_forward : {true, false}) {
        const auto order = [&](const Schedule& s) {
          std::vector<int> micro_batches;
          for (const Action& a : s.ranks[static_cast<size_t>(s.rank_with(stage))])
            if (a.stage == stage && a.kind != backward_weight && (a.kind == forward) == is_forward)
              micro_batches.push_back(a.micro_batch);
          return micro_batches;
        };
        EXPECT_EQ(order(c.schedule), order(apart));
      }
  });
}

size_t num_joined(const std::vector<Action>& list) {
  return static_cast<size_t>(
      std::count_if(list.begin(), list.end(), [](const Action& a) { return a.joins_next; }));
}

// All backwards but those after the last forward, or, in dualpipev, all of its main part.
TEST(Schedule, JoinsAsManyAsThereAre) {
  each_case([&](const Case& c) {
    for (int r = 0; r < c.p; ++r) {
      const auto& list = c.schedule.ranks[static_cast<size_t>(r)];
      const int after = c.p - 1 - r;
      int expected = 0;
      if (c.is_joined && c.name == "1f1b") expected = c.m - (2 * after + 1);
      if (c.is_joined && c.name == "interleaved_1f1b" && c.m % c.p == 0)
        expected = c.v * c.m - ((c.v - 1) * c.p + 2 * after + 1);
      else if (c.name == "interleaved_1f1b" && c.is_joined)
        continue;
      if (c.name == "dualpipev" && c.m < 2 * c.p) continue;
      if (c.is_joined && c.name == "dualpipev")
        expected = 2 * (c.m - 2 * c.p + r + 1) - (after == 0) + after;
      EXPECT_EQ(num_joined(list), static_cast<size_t>(std::max(0, expected))) << "rank " << r;
    }
  });
  const Schedule f = forwards_of(dualpipev(3, 8, true));
  for (const auto& list : f.ranks) EXPECT_EQ(num_joined(list), 0u);
}

TEST(Schedule, SaysWhatIsWrongWithAList) {
  const Schedule good = zero_bubble(3, 4);
  const auto broken = [&](const std::function<void(std::vector<Action>&)>& breaks,
                          const std::string& part) {
    Schedule s = good;
    breaks(s.ranks[1]);
    expect_error([&] { check(s); }, part);
  };
  const auto find = [](std::vector<Action>& list, Action a) {
    return std::find(list.begin(), list.end(), a);
  };
  broken([&](auto& list) { list.erase(find(list, {forward, 1, 3})); },
         "rank 1: I1.3 comes before its forward");
  broken([](auto& list) { list.pop_back(); }, "rank 1: W1.3 is missing");
  broken([](auto& list) { list.push_back({backward_weight, 1, 2}); }, "rank 1: W1.2 is done twice");
  broken([](auto& list) { list.push_back({backward, 1, 2}); }, "rank 1: B1.2 is done twice");
  broken([](auto& list) { list.push_back({forward, 1, 0}); }, "rank 1: F1.0 is done twice");
  broken([](auto& list) { list[0].stage = 2; }, "rank 1: F2.0 is of a stage that is on rank 2");
  broken([](auto& list) { list[0].micro_batch = 4; }, "rank 1: F1.4 is not in a schedule of 3");
  broken(
      [&](auto& list) {
        std::iter_swap(find(list, {backward_input, 1, 0}), find(list, {backward_weight, 1, 0}));
      },
      "rank 1: W1.0 comes before the gradients of its inputs");
  const auto joined = [&](Action a, const std::string& part) {
    broken([&](auto& list) { find(list, a)->joins_next = true; }, part);
  };
  // F1.0 F1.1 I1.0 F1.2 I1.1 W1.0 F1.3 I1.2 W1.1 I1.3 W1.2 W1.3
  joined({forward, 1, 0}, "rank 1: F1.0 is joined with F1.1; only a forward before a backward");
  joined({backward_weight, 1, 0}, "rank 1: W1.0 is joined with F1.3; only");
  joined({backward_weight, 1, 3}, "rank 1: W1.3 is joined with nothing; only");
  broken(
      [&](auto& list) {
        std::swap(find(list, {forward, 1, 1})[0], find(list, {forward, 1, 1})[1]),
            list[0].joins_next = true;
      },
      "rank 1: F1.0 is joined with I1.0; only a forward before a backward of another");
  Schedule may = good;
  find(may.ranks[1], {forward, 1, 1})->joins_next = true;
  EXPECT_NO_THROW(check(may));
  Schedule s = gpipe(2, 2);
  s.ranks[0].clear();
  expect_error([&] { check(s); }, "rank 0: F0.0 is missing");
}

TEST(Schedule, RefusesNamesAndStagesThatDoNotFit) {
  expect_error([] { make_schedule("dualpipe", 2, 1, 4); }, "the schedules are gpipe, 1f1b, ");
  expect_error([] { make_schedule("dualpipev", 2, 1, 4); },
               "dualpipev has 2 stages a rank, and the plan has 1");
  expect_error([] { make_schedule("zbv", 2, 2, 4, true); },
               "zbv has no forward and backward of two micro-batches side by side; those that have "
               "are 1f1b, interleaved_1f1b or dualpipev");
  expect_error([] { make_schedule("zbv", 2, 1, 4); },
               "zbv has 2 stages a rank, and the plan has 1");
  expect_error([] { make_schedule("1f1b", 2, 2, 4); }, "1f1b has 1 stages a rank");
  expect_error([] { make_schedule("interleaved_1f1b", 2, 1, 4); }, "has 2 or more stages a rank");
  expect_error([] { make_schedule("gpipe", 0, 1, 4); }, "a pipeline of 0 ranks");
  expect_error([] { make_schedule("gpipe", 2, 1, 0); }, "0 micro-batches");
  expect_error([] { make_schedule("zbv", 0, 2, 4); },
               "a pipeline of 0 ranks with 2 stages each and 4 micro-batches");
}

std::string text(const std::vector<Action>& list) {
  std::string all;
  for (const Action& a : list) all += to_string(a) + " ";
  return all;
}

// Megatron's order, by hand: two ranks, two stages each, four micro-batches.
TEST(Schedule, InterleavesAsPublished) {
  const Schedule s = interleaved_1f1b(2, 2, 4);
  EXPECT_EQ(text(s.ranks[0]),
            "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3 ");
  EXPECT_EQ(text(s.ranks[1]),
            "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3 ");
}

// As torch has it; the test pipeline.torch compares many.
TEST(Schedule, GoesInAVAsPublished) {
  EXPECT_EQ(text(zbv(2, 2).ranks[1]),
            "F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 I1.0 W1.0 I2.1 W2.1 I1.1 W1.1 ");
  const Schedule s = zbv(3, 6);
  EXPECT_EQ(text(s.ranks[1]),
            "F1.0 F1.1 F1.2 F4.0 F1.3 F4.1 I4.0 W4.0 F4.2 I4.1 W4.1 F1.4 I1.0 W1.0 F4.3 I4.2 W4.2 "
            "F1.5 I1.1 W1.1 F4.4 I4.3 W4.3 I1.2 W1.2 F4.5 I4.4 W4.4 I1.3 I4.5 I1.4 W1.3 I1.5 W1.4 "
            "W4.5 W1.5 ");
  EXPECT_EQ(text(s.ranks[2]),
            "F2.0 F3.0 F2.1 F3.1 F2.2 F3.2 I3.0 W3.0 F2.3 I2.0 W2.0 F3.3 I3.1 W3.1 F2.4 I2.1 W2.1 "
            "F3.4 I3.2 W3.2 F2.5 I2.2 W2.2 F3.5 I3.3 W3.3 I2.3 I3.4 I2.4 I3.5 I2.5 W2.3 W3.4 W3.5 "
            "W2.4 W2.5 ");
}

}  // namespace
}  // namespace moesh::pipeline
