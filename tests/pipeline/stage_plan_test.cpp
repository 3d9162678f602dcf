#include "moesh/pipeline/stage_plan.h"

#include <algorithm>
#include <numeric>

#include "tests/pipeline/support.h"

namespace moesh::pipeline {
namespace {

double largest(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

// What each stage of a plan costs.
std::vector<double> stage_costs(const PartCosts& costs, const StagePlan& plan) {
  std::vector<double> all;
  auto layer = costs.layers.begin();
  for (const int num : plan) {
    all.push_back(std::accumulate(layer, layer + num, 0.0));
    layer += num;
  }
  all.back() += costs.head;
  return all;
}

// Every way to cut n layers into stages, tried one by one.
void each_plan(int n, int stages, StagePlan& plan, const std::function<void()>& f) {
  if (stages == 1) {
    plan.push_back(n), f(), plan.pop_back();
    return;
  }
  for (int first = 1; first <= n - stages + 1; ++first) {
    plan.push_back(first);
    each_plan(n - first, stages - 1, plan, f);
    plan.pop_back();
  }
}

TEST(StagePlan, IsTheBestOfAll) {
  unsigned random = 1;
  for (int n = 1; n <= 11; ++n)
    for (int stages = 1; stages <= n; ++stages) {
      PartCosts costs;
      const auto next = [&] { return 1 + (random = random * 1103515245 + 12345) / 65536 % 9; };
      for (int i = 0; i < n; ++i) costs.layers.push_back(next());
      costs.head = next();
      double least = 1e9, least_squares = 1e9;
      const auto squares = [](const std::vector<double>& all) {
        return std::inner_product(all.begin(), all.end(), all.begin(), 0.0);
      };
      StagePlan plan;
      each_plan(n, stages, plan, [&] {
        const auto c = stage_costs(costs, plan);
        if (largest(c) < least) least = largest(c), least_squares = 1e9;
        if (largest(c) == least) least_squares = std::min(least_squares, squares(c));
      });
      const auto found = balanced_plan(costs, stages);
      EXPECT_EQ(static_cast<int>(found.size()), stages);
      EXPECT_EQ(std::accumulate(found.begin(), found.end(), 0), n);
      EXPECT_EQ(largest(stage_costs(costs, found)), least)
          << n << " layers, " << stages << " stages";
      EXPECT_EQ(squares(stage_costs(costs, found)), least_squares);
    }
}

TEST(StagePlan, CountsTheHead) {
  const PartCosts alike{.layers = std::vector<double>(8, 1.0)};
  EXPECT_EQ(balanced_plan(alike, 4), (StagePlan{2, 2, 2, 2}));
  PartCosts head = alike;
  head.head = 1;
  EXPECT_EQ(balanced_plan(head, 3), (StagePlan{3, 3, 2}));
  // {2, 2, 1} is more even, and its first stage takes 16.
  EXPECT_EQ(balanced_plan({.layers = {7, 9, 6, 6, 8}}, 3), (StagePlan{1, 2, 2}));
  EXPECT_EQ(stage_costs(head, {3, 3, 2}), (std::vector<double>{3, 3, 3}));
}

// The unit of the costs is nobody's business, and of plans that are as good one is chosen always.
TEST(StagePlan, IsTheSameInEveryUnit) {
  for (const double unit : {1e-6, 0.05, 1.0, 1e12}) {
    PartCosts costs{.layers = {7, 9, 6, 6, 8}};
    for (double& layer : costs.layers) layer *= unit;
    EXPECT_EQ(balanced_plan(costs, 3), (StagePlan{1, 2, 2})) << unit;
  }
  EXPECT_EQ(balanced_plan({.layers = std::vector<double>(8, 1.0)}, 3), (StagePlan{2, 3, 3}));
  EXPECT_EQ(balanced_plan({.layers = {0, 0, 0}}, 3), (StagePlan{1, 1, 1}));
}

TEST(StagePlan, TakesWhatTheUserGives) {
  EXPECT_EQ(given_plan("4,5,5,4", 18), (StagePlan{4, 5, 5, 4}));
  EXPECT_EQ(given_plan("5", 18), (StagePlan{5, 5, 5, 3}));
  EXPECT_EQ(plan_text(given_plan("5", 18)), "5,5,5,3");
  EXPECT_EQ(given_plan("6", 18), (StagePlan{6, 6, 6}));
  EXPECT_EQ(given_plan("20", 18), (StagePlan{18}));
  EXPECT_EQ(given_plan("2147483647", 18), (StagePlan{18}));
  expect_error([] { given_plan("4,5", 18); }, "which are 9, and the model has 18");
  expect_error([] { given_plan("1073741824,1073741824,1073741824,1073741828", 4); },
               "which are 4294967300, and the model has 4");
  expect_error([] { given_plan("4,2147483648", 9); }, "'2147483648' is not a number of layers");
  expect_error([] { given_plan("4,,5", 9); }, "'' is not a number of layers");
  expect_error([] { given_plan("4,5,", 9); }, "'' is not a number of layers");
  expect_error([] { given_plan("", 9); }, "'' is not a number of layers");
  expect_error([] { given_plan("4,5x", 9); }, "'5x' is not a number of layers");
  expect_error([] { given_plan("0,9", 9); }, "'0' is not a number of layers");
  expect_error([] { balanced_plan({.layers = {1, 1}}, 3); }, "2 layers does not make 3 stages");
}

}  // namespace
}  // namespace moesh::pipeline
