#include "moesh/train/metrics/record.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "moesh/train/memory.h"

namespace moesh::train {
namespace {

at::Tensor counts(const std::vector<std::int64_t>& of_each) { return at::tensor(of_each); }

TEST(ExpertLoad, IsThatOfTheWorstLayer) {
  const ExpertLoad load = expert_load({counts({4, 4, 4, 4}), counts({12, 0, 3, 1})});
  EXPECT_EQ(load.max_over_mean, 3);
  EXPECT_EQ(load.num_idle, 1);
}

TEST(ExpertLoad, HasTheEntropyOfEachLayer) {
  const ExpertLoad load = expert_load({counts({4, 4, 4, 4}), counts({8, 0, 8, 0}), counts({0, 7})});
  ASSERT_EQ(load.entropy.size(), 3u);
  EXPECT_NEAR(load.entropy[0], std::log(4.0), 1e-15);
  EXPECT_NEAR(load.entropy[1], std::log(2.0), 1e-15);
  EXPECT_EQ(load.entropy[2], 0);
}

TEST(ExpertLoad, OfNoTokensAndOfNoLayers) {
  EXPECT_EQ(expert_load({counts({0, 0})}).max_over_mean, 0);
  EXPECT_EQ(expert_load({counts({0, 0})}).num_idle, 2);
  EXPECT_EQ(expert_load({counts({0, 0})}).entropy[0], 0);
  EXPECT_EQ(expert_load({}).max_over_mean, 0);
}

TEST(StepRecord, SharesOfFloat8AreOfLayersThatHaveIt) {
  StepRecord r{.seconds = 1};
  EXPECT_TRUE(float8_shares({}).empty());
  r.float8 = {{"experts", "gradients", {std::nan(""), 0.5}, {std::nan(""), 0.25}}};
  Scalars found;
  for (const auto& s : scalars_of(r))
    if (s.first.starts_with("float8/")) found.push_back(s);
  EXPECT_EQ(found, (Scalars{{"float8/experts/gradients/zeros/layer_1", 0.5},
                            {"float8/experts/gradients/largest/layer_1", 0.25}}));
}

TEST(StepRecord, SpeedIsThatOfTheStep) {
  StepRecord r{.seconds = 0.5, .num_tokens = 100, .flops_per_token = 3e10};
  EXPECT_EQ(r.tokens_per_second(), 200);
  EXPECT_DOUBLE_EQ(r.tflops(), 6);
  EXPECT_EQ(r.peak_fraction(), 0) << "nobody knows the peak";
  r.peak_tflops = 24;
  EXPECT_DOUBLE_EQ(r.peak_fraction(), 0.25);
}

TEST(Peak, IsThatOfTheLongestName) {
  EXPECT_EQ(peak_tflops("NVIDIA H200"), 989);
  EXPECT_EQ(peak_tflops("NVIDIA H100 80GB HBM3"), 989);
  EXPECT_EQ(peak_tflops("NVIDIA H100 PCIe"), 756);
  EXPECT_EQ(peak_tflops("NVIDIA A100-SXM4-80GB"), 312);
  EXPECT_EQ(peak_tflops("NVIDIA L40S"), 362);
  EXPECT_EQ(peak_tflops("some processor"), 0);
  EXPECT_EQ(peak_tflops(""), 0);
}

}  // namespace
}  // namespace moesh::train
