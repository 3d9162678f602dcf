#include "moesh/train/metrics/record.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace moesh::train {
namespace {

at::Tensor counts_with_idle(std::int64_t num_idle, std::int64_t first = 0) {
  at::Tensor c = at::ones({8}, at::kLong) * 5;
  for (std::int64_t e = 0; e < num_idle; ++e) c[(first + e) % 8] = 0;
  return c;
}

TEST(CollapseWatch, WarnsOnceOfAQuarterThatIsIdle) {
  CollapseWatch watch;
  for (int step = 1; step < CollapseWatch::kPatience; ++step)
    EXPECT_TRUE(watch.observe({counts_with_idle(0), counts_with_idle(2)}).empty()) << step;
  const auto told = watch.observe({counts_with_idle(0), counts_with_idle(2)});
  ASSERT_EQ(told.size(), 1u);
  EXPECT_NE(told[0].find("MoE layer 1: 2 of 8 experts have had no token for 20 steps"),
            std::string::npos)
      << told[0];
  EXPECT_NE(told[0].find("moe.load_balance_coeff"), std::string::npos);
  EXPECT_TRUE(watch.observe({counts_with_idle(0), counts_with_idle(3)}).empty()) << "it was said";
  EXPECT_TRUE(watch.observe({counts_with_idle(0), counts_with_idle(0)}).empty());
  for (int step = 1; step < CollapseWatch::kPatience; ++step)
    EXPECT_TRUE(watch.observe({counts_with_idle(0), counts_with_idle(8)}).empty())
        << "it had recovered";
  EXPECT_EQ(watch.observe({counts_with_idle(0), counts_with_idle(8)}).size(), 1u);
}

// Few tokens leave some experts out in every step, but never the same ones for long; and one expert
// of eight is less than a quarter.
TEST(CollapseWatch, DoesNotMindExpertsThatTakeTurns) {
  CollapseWatch watch;
  for (int step = 0; step < 100; ++step)
    EXPECT_TRUE(watch.observe({counts_with_idle(6, step), counts_with_idle(1)}).empty()) << step;
}

}  // namespace
}  // namespace moesh::train
