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
  EXPECT_GT(num_cases, 800);
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
  Schedule s = gpipe(2, 2);
  s.ranks[0].clear();
  expect_error([&] { check(s); }, "rank 0: F0.0 is missing");
}

TEST(Schedule, RefusesNamesAndStagesThatDoNotFit) {
  expect_error([] { make_schedule("dualpipe", 2, 1, 4); }, "the schedules are gpipe, 1f1b, ");
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
