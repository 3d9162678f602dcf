// The sweep, for mistakes that no quicker test has found: whole models, one optimizer step, on
// every mesh of two, three and four ranks, with every schedule of pipelines, against one rank.

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>

#include "moesh/verify/verify.h"
#include "tests/train/device.h"

namespace moesh {
namespace {

struct SweepCase {
  std::string model;
  verify::SweepMesh mesh;
  bool sequence_parallel;
};

// Every mesh once; the models and sequence parallelism take turns.
std::vector<SweepCase> all_cases() {
  const std::string models[] = {"deepseek_v3",   "qwen3_moe",  "mixtral",    "llama4",
                                "gpt_oss",       "qwen2_moe",  "olmoe",      "glm4_moe",
                                "glm4_moe_lite", "minimax_m2", "granitemoe", "qwen3_next"};
  std::vector<SweepCase> all;
  for (const auto& mesh : verify::Sweep{.least_ranks = 2, .most_ranks = 4}.meshes()) {
    const std::string& turn = models[all.size() % std::size(models)];
    const bool fits = mesh.shape.cp == 1 || turn != "qwen3_next";
    all.push_back({fits ? turn : models[0], mesh, all.size() / std::size(models) % 2 == 0});
  }
  return all;
}

std::string case_name(const testing::TestParamInfo<SweepCase>& info) {
  std::string name = info.param.model + "_" + info.param.mesh.describe();
  std::ranges::replace_if(name, [](unsigned char c) { return !std::isalnum(c); }, '_');
  return name + "_" + std::to_string(info.index);
}

class MachineSweep : public testing::TestWithParam<SweepCase> {};
INSTANTIATE_TEST_SUITE_P(All, MachineSweep, testing::ValuesIn(all_cases()), case_name);

TEST_P(MachineSweep, ComputesWhatOneRankDoes) {
  const auto& [model, swept, sequence_parallel] = GetParam();
  const config::Origin test{"test"};
  config::Settings settings = verify::verify_defaults(1);
  for (const auto& more : test_settings()) settings.push_back(more);
  settings.push_back({"model.name", model, test});
  settings.push_back({"model.size", std::string("tiny"), test});
  settings.push_back({"parallelism.sequence_parallel", sequence_parallel, test});
  settings.push_back({"data.batch_size", std::int64_t{swept.shape.tp > 1 ? 2 : 3}, test});
  const verify::VerifyCase c{verify::fitted(config::merged(settings), swept), 1};
  const auto report = verify::verify(c, verify::run_reference(c));
  EXPECT_TRUE(report.holds()) << report.describe(swept.shape);
}

}  // namespace
}  // namespace moesh
