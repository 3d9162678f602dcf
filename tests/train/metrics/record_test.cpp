#include "moesh/train/metrics/record.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

namespace moesh::train {
namespace {

at::Tensor counts(const std::vector<std::int64_t>& of_each) { return at::tensor(of_each); }

TEST(ExpertLoad, IsThatOfTheWorstLayer) {
  const ExpertLoad load = expert_load({counts({4, 4, 4, 4}), counts({12, 0, 3, 1})});
  EXPECT_EQ(load.max_over_mean, 3);
  EXPECT_EQ(load.num_idle, 1);
}

TEST(ExpertLoad, OfNoTokensAndOfNoLayers) {
  EXPECT_EQ(expert_load({counts({0, 0})}).max_over_mean, 0);
  EXPECT_EQ(expert_load({counts({0, 0})}).num_idle, 2);
  EXPECT_EQ(expert_load({}).max_over_mean, 0);
}

TEST(StepRecord, SpeedIsThatOfTheStep) {
  const StepRecord r{.seconds = 0.5, .num_tokens = 100, .flops_per_token = 3e10};
  EXPECT_EQ(r.tokens_per_second(), 200);
  EXPECT_DOUBLE_EQ(r.tflops(), 6);
}

}  // namespace
}  // namespace moesh::train
