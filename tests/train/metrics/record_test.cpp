#include "moesh/train/metrics/record.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <sstream>

#include "moesh/base/text.h"
#include "moesh/train/metrics/sink.h"
#include "tests/support.h"
#include "tests/train/metrics/support.h"

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

// The sinks against each other: every number of the table is in metrics.jsonl, and in the other two
// unless it is known that they do without it.
TEST(StepRecord, HasTheSameNumbersInEverySink) {
  const StepRecord r{.step = 12,
                     .time = 1.7e9,
                     .seconds = 0.5,
                     .loss = 2.125,
                     .total_loss = 2.5,
                     .auxiliary = {0.25, 0.0625, 0.03125},
                     .grad_norm = 0.875,
                     .max_logit = 40.5,
                     .lr = 0.0078125,
                     .num_tokens = 96,
                     .num_read = 128,
                     .num_tokens_all = 1152,
                     .flops_per_token = 1e9,
                     .peak_tflops = 0.768,
                     .memory_gib = 1.5,
                     .experts = {.max_over_mean = 3, .num_idle = 7},
                     .skipped = true};
  const TemporaryFile file("metrics.csv", "");
  CsvSink(std::filesystem::path(file.path()).parent_path(), 0, {}).write(r);
  std::istringstream lines(read(file.path()));
  std::string header, row;
  std::getline(lines, header), std::getline(lines, row);
  const auto names = split(header, ','), cells = split(row, ',');
  ASSERT_EQ(names.size(), cells.size());
  const std::set<std::string> not_in_csv{"trained_share", "max_logit"},
      not_in_tensorboard{"step", "time", "tokens", "trained_share"};
  const formats::JsonValue json{to_json(r)};
  for (const MetricNumber& m : metric_numbers()) {
    const auto number = m.found_in(r);
    ASSERT_TRUE(number && *number != 0) << m.name << ": set it above";
    const auto* in_json = json.find(m.name);
    ASSERT_TRUE(in_json) << m.name;
    EXPECT_EQ(*in_json, m.of(r)) << m.name;
    const auto column = std::ranges::find(names, m.name);
    EXPECT_EQ(column == names.end(), not_in_csv.contains(m.name)) << m.name;
    if (column != names.end())
      EXPECT_EQ(number_of<double>(cells[static_cast<std::size_t>(column - names.begin())]), number)
          << m.name;
    const double shown = m.name == std::string("peak_fraction") ? 100 * *number : *number;
    EXPECT_EQ(std::ranges::none_of(scalars_of(r), [&](const auto& s) { return s.second == shown; }),
              not_in_tensorboard.contains(m.name))
        << m.name;
  }
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
