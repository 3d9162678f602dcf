// Parameters that are not trained (training.freeze), of every model and on meshes of every kind.

#include <gtest/gtest.h>

#include "moesh/base/error.h"
#include "moesh/verify/verify_all.h"
#include "tests/checkpoint/support.h"
#include "tests/train/take_step.h"

namespace moesh::verify {
namespace {

struct Case {
  std::string model, freeze, mesh;
  Args more = {};
};

class Freeze : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    All, Freeze,
    testing::Values(
        Case{"deepseek_v3", "*.gate.weight, model.embed_tokens.weight", "dp_shard=2,tp=2,ep=2"},
        // Both ends of a pipeline have the embedding; its halves of backward have less to do.
        Case{"qwen3_moe",
             "model.embed_tokens.weight,*.q_proj.weight",
             "pp=2,dp_shard=2",
             {"--model.tie_embeddings=true", "--parallelism.pipeline_parallel_schedule=zero_bubble",
              "--training.gradient_accumulation_steps=3"}},
        Case{"mixtral", "*.experts.*", "dp_shard=2,ep=2", {"--activation_checkpoint.mode=full"}},
        // All of the first stage: its rank trains nothing.
        Case{"llama4",
             "model.embed_tokens.weight,model.layers.0.*",
             "pp=2,tp=2",
             {"--model.num_layers=2", "--activation_checkpoint.mode=full"}},
        Case{"gpt_oss",
             "*.self_attn.*,lm_head.weight,model.norm.weight",
             "dp_replicate=2,cp=2",
             {"--activation_checkpoint.mode=selective"}}),
    [](const auto& info) { return info.param.model; });

TEST_P(Freeze, MeshesComputeWhatOneRankDoes) {
  const auto& [model, freeze, mesh, more] = GetParam();
  Args args{"--model", model + ":tiny",     "--mesh", mesh, "--dtype",
            "float64", "--training.freeze", freeze};
  args.insert(args.end(), more.begin(), more.end());
  const VerifyCase c{config::load_config(args, verify_defaults(2))};
  const auto report = verify(c, run_reference(c));
  EXPECT_TRUE(report.holds()) << report.describe(mesh_shape(c.config));
}

const Args kFrozen{"--model", "mixtral:tiny", "--training.freeze=*.experts.*,lm_head.weight"};

bool is_frozen(const std::string& name) {
  return name.find(".experts.") != std::string::npos || name.find("lm_head") == 0;
}

TEST(Frozen, StaysAndHasNoMasterNorStateNorGradient) {
  const TemporaryFolder folder;
  Args args = kFrozen;
  args.insert(args.end(), {"--dtype", "bfloat16", "--kernels.weight_copies=true"});
  const config::Config config = run_config(folder.path() / "run", "dp_shard=2", args);
  comm::launch(2, [&](comm::Group& world) {
    const Mesh mesh(world, mesh_shape(config));
    const MeshScope scope(mesh);
    const auto model = train::make_model(config), initial = train::make_model(config);
    const auto optimizer = train::make_optimizer(*model, config);
    const auto data = train::open_dataset(config);
    for (int step = 0; step < 2; ++step)
      train::take_step(*model, *optimizer, train::step_batches(config, *data, mesh, 4 * step), 0.1,
                       train::step_options(config));
    std::map<std::string, at::Tensor> before;
    initial->each_param([&](Stored& w, bool) { before[w.spec.name] = w.value.detach(); });
    int num_frozen = 0;
    model->each_param([&](Stored& w, bool) {
      EXPECT_EQ(w.spec.trained, !is_frozen(w.spec.name)) << w.spec.name;
      EXPECT_EQ(w.value.equal(before.at(w.spec.name)), is_frozen(w.spec.name)) << w.spec.name;
      EXPECT_EQ(w.value.requires_grad(), !is_frozen(w.spec.name)) << w.spec.name;
      if (!is_frozen(w.spec.name)) return;
      ++num_frozen;
      EXPECT_EQ(w.value.scalar_type(), at::kBFloat16) << w.spec.name;
      EXPECT_FALSE(w.copy) << w.spec.name;
      EXPECT_FALSE(w.value.grad().defined()) << w.spec.name;
    });
    EXPECT_GT(num_frozen, 3);
    for (const auto& s : optimizer->state()) EXPECT_FALSE(is_frozen(s.name)) << s.name;
  });
}

TEST(Frozen, IsSavedAndARunGoesOn) {
  const TemporaryFolder folder;
  const auto with = [](const char* steps) {
    Args args = kFrozen;
    args.insert(args.end(), {"--dtype", "bfloat16", "--lr_scheduler.kind=constant", steps});
    return args;
  };
  const auto at_once = folder.path() / "at_once", in_parts = folder.path() / "in_parts";
  run(at_once, "dp_shard=2", with("--steps=4"));
  run(in_parts, "dp_shard=2", with("--steps=2"));
  run(in_parts, "dp_shard=2", with("--steps=4"));
  const auto last = checkpoint::step_name(4);
  expect_same_contents(at_once / last, in_parts / last);
  bool has_state = false;
  for (const auto& [name, bytes] : contents(at_once / last)) {
    has_state = has_state || bytes.find("norm.weight.exp_avg") != std::string::npos;
    EXPECT_EQ(bytes.find("lm_head.weight.exp_avg"), std::string::npos) << name;
    EXPECT_EQ(bytes.find("experts.w1.exp_avg"), std::string::npos) << name;
  }
  EXPECT_TRUE(has_state);
}

std::string error_of(const std::string& freeze) {
  try {
    train::frozen(config::load_config({"--model", "mixtral:tiny", "--training.freeze=" + freeze}));
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::config);
    return e.what();
  }
  return "";
}

TEST(Frozen, WhatMatchesNothingOrEverythingIsAnError) {
  EXPECT_EQ(error_of("*.gate.weight"), "");
  EXPECT_NE(
      error_of("*.gates.weight").find("*.gates.weight matches no parameter; the nearest names"),
      std::string::npos)
      << error_of("*.gates.weight");
  EXPECT_NE(error_of("*.gates.weight").find("gate.weight,"), std::string::npos)
      << error_of("*.gates.weight");
  EXPECT_NE(error_of("*").find("nothing is left to train"), std::string::npos);
  EXPECT_NE(error_of("lm_head.weight,,*.gate.weight").find("is empty"), std::string::npos);
  EXPECT_NE(error_of("*.experts.0.w1.weight").find("match them all"), std::string::npos)
      << error_of("*.experts.0.w1.weight");
}

}  // namespace
}  // namespace moesh::verify
