// Every mistake that can be switched on is found by the parity check, and its message names the
// tensor and the factor. This program is built from sources with MOESH_WITH_MUTANTS.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>

#include "moesh/base/mutant.h"
#include "moesh/verify/compare.h"
#include "moesh/verify/dump.h"
#include "moesh/verify/layer_parity.h"
#include "moesh/verify/verify.h"
#include "tests/train/device.h"

namespace moesh {
namespace {

using verify::LayerCase;

struct Mutant {
  std::string name;
  MeshShape mesh;
  std::function<void(LayerCase&)> setting;
  std::string first;  // the first tensor in forward order that differs; "error": a rank throws
  std::string axis;   // over which the mean of the factors is `mean`; empty: any
  double mean = 0;
};

LayerCase base_case() {
  LayerCase c;
  c.layer.router = {.num_experts = 8, .top_k = 2, .normalize = true};
  c.layer.experts = {.num_experts = 8, .dim = 6, .ffn = 8};
  c.layer.dtype = at::kDouble;
  c.layer.device = test_device();
  c.layer.dispatcher = nn::Dispatcher::all_to_all;
  c.layer.init = {.kind = Init::Kind::normal, .scale = 0.6, .seed = 9};
  c.batch = 2, c.sequence = 7;
  return c;
}

const std::vector<Mutant>& mutants() {
  const auto nothing = [](LayerCase&) {};
  const auto balanced = [](LayerCase& c) { c.layer.router.forced_balance = true; };
  const auto biases = [](LayerCase& c) {
    c.layer.experts.biases = true;
    c.layer.experts.activation = kernels::Activation::clamped_swiglu;
  };
  static const std::vector<Mutant> all{
      // Where tokens are: seen where something depends on the global token.
      {"b1_index_formula", {.tp = 2}, balanced, "counts", ""},
      {"padded_stride_decode", {.tp = 4}, balanced, "counts", ""},
      // The gate: its gradient is a sum over tp as well.
      {"gate_gradient_not_reduced", {.tp = 2, .ep = 2}, nothing, "d(moe.gate.weight)", "tp", 0.5},
      {"gate_gradient_not_reduced", {.tp = 4, .ep = 4}, nothing, "d(moe.gate.weight)", "tp", 0.25},
      {"gate_gradient_reduced_twice", {.tp = 2, .ep = 2}, nothing, "d(moe.gate.weight)", "tp", 2},
      {"score_gradient_not_reduced_over_etp", {.tp = 2, .etp = 2}, nothing, "d(x)", ""},
      {"x_gradient_not_reduced_with_ep_off", {.tp = 2, .etp = 2}, nothing, "d(x)", ""},
      {"expert_gradient_averaged_over_ep",
       {.dp_shard = 2, .ep = 2},
       nothing,
       "d(moe.experts.w1)",
       "ep",
       0.5},
      {"expert_gradient_averaged_over_ep",
       {.tp = 4, .ep = 4},
       nothing,
       "d(moe.experts.w1)",
       "ep",
       0.25},
      {"padding_row_counted", {.tp = 4, .ep = 4}, nothing, "counts", ""},
      {"rank_without_tokens_leaves",
       {.tp = 4, .ep = 4},
       [](LayerCase& c) { c.sequence = 3; },
       "error",
       ""},
      {"last_index_wins_ties",
       {.tp = 2, .ep = 2},
       [](LayerCase& c) { c.equal_scores = true; },
       "counts",
       ""},
      {"scores_on_the_wrong_side", {.tp = 2, .ep = 2}, nothing, "output", ""},
      {"combined_in_arrival_order", {.tp = 2, .ep = 2}, nothing, "output", ""},
      {"row_returned_to_the_next_token", {.tp = 2, .ep = 2}, nothing, "output", ""},
      {"detached_scores", {.tp = 2, .ep = 2}, [](LayerCase& c) { c.z_weight = 0.1; }, "d(x)", ""},
      {"extra_all_reduce_at_the_boundary",
       {.tp = 2, .ep = 2},
       [](LayerCase& c) { c.sequence_parallel = false; },
       "d(x)",
       "tp",
       2},
      {"bias_on_every_rank", {.tp = 2, .etp = 2}, biases, "output", ""},
  };
  return all;
}

class Mutants : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(All, Mutants, testing::Range(0, static_cast<int>(mutants().size())),
                         [](const auto& info) {
                           const auto& m = mutants()[static_cast<size_t>(info.param)];
                           return m.name + "_" + std::to_string(m.mesh.num_ranks());
                         });

TEST_P(Mutants, AreFound) {
  const Mutant& mutant = mutants()[static_cast<size_t>(GetParam())];
  LayerCase c = base_case();
  mutant.setting(c);
  auto options = test_options();
  options.timeout = std::chrono::seconds(5);
  current_mutant() = "";
  const auto reference = verify::run_reference(c, mutant.mesh.dp_replicate * mutant.mesh.dp_shard);
  const auto healthy = verify::compare_layer({c}, {&reference}, mutant.mesh, options)[0];
  ASSERT_TRUE(healthy.holds()) << healthy.describe(c, mutant.mesh);

  current_mutant() = mutant.name;
  const auto report = verify::compare_layer({c}, {&reference}, mutant.mesh, options)[0];
  current_mutant() = "";
  const std::string text = report.describe(c, mutant.mesh);
  ASSERT_FALSE(report.holds()) << "nobody noticed: " << text;
  if (mutant.first == "error") {
    EXPECT_NE(report.error.find("rank"), std::string::npos) << text;
    EXPECT_NE(report.error.find("operation"), std::string::npos) << text;
    return;
  }
  EXPECT_EQ(report.error, "");
  ASSERT_FALSE(report.mismatches.empty()) << text;
  const auto& first = report.mismatches[0];
  EXPECT_EQ(first.tensor, mutant.first) << text;
  if (!mutant.axis.empty()) {
    ASSERT_TRUE(first.means.contains(mutant.axis)) << text;
    EXPECT_NEAR(first.means.at(mutant.axis), mutant.mean, 1e-9) << text;
    EXPECT_NE(text.find("mean over " + mutant.axis), std::string::npos) << text;
  }
}

// The mistakes nearest to the trainer: a small model, one step.
class TrainerMutants
    : public testing::TestWithParam<std::tuple<std::string, MeshShape, std::string>> {};
INSTANTIATE_TEST_SUITE_P(
    All, TrainerMutants,
    testing::Values(
        std::tuple{"labels_shifted_after_the_cut", MeshShape{.cp = 2}, "step 0 loss"},
        std::tuple{"loss_averaged_per_rank", MeshShape{.dp_shard = 2}, "step 0 loss"},
        std::tuple{"vocabulary_loss_without_its_reduction", MeshShape{.tp = 2}, "step 0 loss"},
        std::tuple{"positions_begin_at_zero", MeshShape{.cp = 2}, "step 0 counts of MoE layer 0"},
        std::tuple{"expert_gradient_averaged_over_ep", MeshShape{.dp_shard = 2, .ep = 2},
                   "d(model.layers.1.mlp.experts.w1)"},
        std::tuple{"clip_without_experts", MeshShape{.dp_shard = 2, .ep = 2},
                   "model.layers.1.mlp.experts.w1"},
        std::tuple{"bias_counts_without_cp", MeshShape{.cp = 2}, "expert bias of MoE layer 0"},
        std::tuple{"norm_counts_tp_replicas", MeshShape{.tp = 2}, "step 0 gradient norm"}),
    [](const auto& info) { return std::get<0>(info.param); });

// One step of a small model on a mesh.
verify::VerifyCase small_case(const MeshShape& mesh, const config::Settings& more = {}) {
  config::Settings settings = verify::verify_defaults(1);
  for (const auto& s : {config::mesh_settings(mesh, "test"), test_settings(), more})
    settings.insert(settings.end(), s.begin(), s.end());
  return {config::merged(settings), 1};
}

TEST_P(TrainerMutants, AreFound) {
  const auto& [name, mesh, first] = GetParam();
  const auto c = small_case(mesh, {{"training.max_norm", 0.01, {"test"}}});
  current_mutant() = "";
  const auto reference = verify::run_reference(c);
  const auto healthy = verify::verify(c, reference);
  ASSERT_TRUE(healthy.holds()) << healthy.describe(mesh);
  current_mutant() = name;
  const auto report = verify::verify(c, reference);
  current_mutant() = "";
  ASSERT_FALSE(report.holds()) << "nobody noticed " << name;
  ASSERT_FALSE(report.mismatches.empty()) << report.error;
  EXPECT_EQ(report.mismatches[0].tensor, first) << report.describe(mesh);
}

// Someone who has two files of gradients, and no verify: compare finds the tensor and the factor.
TEST(CompareMutants, TheFactorIsInTheFiles) {
  const auto reference = verify::run_reference(small_case({.dp_shard = 4}));
  const auto folder =
      std::filesystem::path(testing::TempDir()) / ("moesh_gradients_" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  const auto gradients = [&](const MeshShape& mesh, const std::string& name) {
    verify::NamedTensors values, only;
    verify::verify(small_case(mesh), reference, &values);
    for (const auto& t : values.tensors)
      if (t.first.starts_with("d(")) only.tensors.push_back(t);
    verify::write_tensors((folder / name).string(), only);
    return (folder / name).string();
  };
  current_mutant() = "expert_gradient_averaged_over_ep";
  const auto a = gradients({.dp_shard = 4, .ep = 4}, "a.safetensors"),
             b = gradients({.dp_shard = 4, .ep = 2}, "b.safetensors");
  current_mutant() = "";
  const auto healthy = gradients({.dp_shard = 4, .ep = 4}, "healthy.safetensors");
  const auto one_rank = gradients({.dp_shard = 4}, "one.safetensors");
  EXPECT_TRUE(verify::compare(healthy, one_rank).same());
  const auto found = verify::compare(a, b);  // a quarter and a half
  ASSERT_FALSE(found.same());
  EXPECT_EQ(found.first_difference()->name, "d(model.layers.1.mlp.experts.w1)");
  EXPECT_NEAR(found.first_difference()->factor, 0.5, 1e-9);
  EXPECT_NE(found.first_difference()->diagnosis().find("a is 1/2 of b"), std::string::npos);
  for (const auto& t : found.tensors)
    EXPECT_EQ(t.state == verify::ComparedTensor::State::differs,
              t.name.find(".experts.w") != std::string::npos)
        << t.name;
  std::filesystem::remove_all(folder);
}

TEST(BalanceMutants, CountsOfAnEvaluationAreFound) {
  const auto bias_after_evaluation = [] {
    const auto world = comm::solo_group();
    const Mesh mesh(*world, {});
    const MeshScope scope(mesh);
    nn::Moe moe(base_case().layer);
    const nn::Tokens tokens(mesh, 1, 3, true);
    const at::Tensor x = at::ones({1, 3, 6}, at::TensorOptions(at::kDouble).device(test_device()));
    moe(assume<Dense{Place::T, Place::T, Place::T}>(x), tokens, {.pass = nn::Pass::evaluation});
    moe.router().update_bias(0.1);
    return moe.router().expert_bias().abs().sum().item<double>();
  };
  EXPECT_EQ(bias_after_evaluation(), 0);
  current_mutant() = "counted_in_evaluation";
  EXPECT_GT(bias_after_evaluation(), 0);
  current_mutant() = "";
}

}  // namespace
}  // namespace moesh
