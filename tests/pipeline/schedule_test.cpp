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
}

// Megatron's order, by hand: two ranks, two stages each, four micro-batches.
TEST(Schedule, InterleavesAsPublished) {
  const auto text = [](const std::vector<Action>& list) {
    std::string all;
    for (const Action& a : list) all += to_string(a) + " ";
    return all;
  };
  const Schedule s = interleaved_1f1b(2, 2, 4);
  EXPECT_EQ(text(s.ranks[0]),
            "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3 ");
  EXPECT_EQ(text(s.ranks[1]),
            "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3 ");
}

}  // namespace
}  // namespace moesh::pipeline
