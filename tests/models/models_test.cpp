// Every model, in variants that differ in what they compute, on meshes of every kind against one
// rank: loss, logits, every gradient, counts, parameters after two steps.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <utility>

#include "moesh/fsdp/fsdp.h"
#include "moesh/models/registry.h"
#include "moesh/train/build.h"
#include "moesh/verify/verify.h"
#include "tests/comm/trace.h"
#include "tests/support.h"
#include "tests/tier.h"
#include "tests/train/device.h"

namespace moesh {
namespace {

using models::AnyConfig;
using models::Glm4MoeConfig;
using models::Glm4MoeLiteConfig;
using models::GptOssConfig;
using models::GraniteMoeConfig;
using models::Llama4Config;
using models::MinimaxM2Config;
using models::MixtralConfig;
using models::OlmoeConfig;
using models::Qwen2MoeConfig;
using models::Qwen3MoeConfig;
using models::Qwen3NextConfig;

struct Variant {
  std::string name;
  AnyConfig config;
};

template <class Config>
AnyConfig changed(const std::function<void(Config&)>& change) {
  Config c = models::built_in<Config>("tiny");
  change(c);
  return c;
}

const std::vector<Variant>& variants() {
  static const std::vector<Variant> all{
      {"qwen3_moe", models::built_in<Qwen3MoeConfig>("tiny")},
      {"qwen3_moe_tied_sparse_step_window", changed<Qwen3MoeConfig>([](auto& c) {
         c.mlp_only_layers = {}, c.sparse_step = 2, c.num_layers = 4, c.tie_embeddings = true,
         c.normalize = false;
         c.window = 3, c.attention_bias = true;
       })},
      {"mixtral", models::built_in<MixtralConfig>("tiny")},
      {"mixtral_window_one_expert",
       changed<MixtralConfig>([](auto& c) { c.window = 2, c.top_k = 1, c.num_kv_heads = 8; })},
      {"llama4", models::built_in<Llama4Config>("tiny")},
      {"llama4_all_moe_two_experts", changed<Llama4Config>([](auto& c) {
         c.moe_layers = {{0, 1, 2, 3}}, c.nope_layers = {{0, 2}}, c.top_k = 2, c.qk_norm = false,
         c.tie_embeddings = true;
       })},
      {"gpt_oss", models::built_in<GptOssConfig>("tiny")},
      {"gpt_oss_plain_rope", changed<GptOssConfig>([](auto& c) {
         c.rope.factor = 1, c.window = 1, c.top_k = 3, c.num_layers = 2;
       })},
      {"qwen2_moe", models::built_in<Qwen2MoeConfig>("tiny")},
      {"qwen2_moe_tied_sparse_step", changed<Qwen2MoeConfig>([](auto& c) {
         c.mlp_only_layers = {}, c.sparse_step = 2, c.num_layers = 4, c.tie_embeddings = true,
         c.normalize = true, c.attention_bias = false;
       })},
      {"olmoe", models::built_in<OlmoeConfig>("tiny")},
      {"olmoe_unclipped_bias", changed<OlmoeConfig>([](auto& c) {
         c.clip = 0, c.attention_bias = true, c.num_kv_heads = 8, c.normalize = true;
       })},
      {"glm4_moe", models::built_in<Glm4MoeConfig>("tiny")},
      {"glm4_moe_groups_no_norm", changed<Glm4MoeConfig>([](auto& c) {
         c.num_groups = 4, c.top_groups = 2, c.qk_norm = false, c.attention_bias = false,
         c.num_shared = 2, c.rotary_dim = 2, c.num_layers = 2, c.tie_embeddings = true;
       })},
      {"glm4_moe_lite", models::built_in<Glm4MoeLiteConfig>("tiny")},
      {"minimax_m2", models::built_in<MinimaxM2Config>("tiny")},
      {"granitemoe", models::built_in<GraniteMoeConfig>("tiny")},
      {"granitemoe_tied_bias", changed<GraniteMoeConfig>([](auto& c) {
         c.tie_embeddings = true, c.attention_bias = true, c.top_k = 3;
       })},
      {"qwen3_next", models::built_in<Qwen3NextConfig>("tiny")},
      {"qwen3_next_layers_tied", changed<Qwen3NextConfig>([](auto& c) {
         c.mlp_only_layers = {}, c.sparse_step = 2, c.num_layers = 4, c.tie_embeddings = true,
         c.full_layers = std::vector<std::int64_t>{0}, c.num_value_heads = 4, c.num_taps = 2,
         c.attention_bias = true, c.normalize = false;
       })},
  };
  return all;
}

class Models : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(All, Models, testing::Range<size_t>(0, variants().size()),
                         [](const auto& info) { return variants()[info.param].name; });

TEST_P(Models, ComputeTheSameOnEveryMesh) {
  const std::vector<MeshShape> meshes{{.tp = 2, .ep = 2},
                                      {.tp = 2, .etp = 2},
                                      {.cp = 3},
                                      {.dp_shard = 2, .ep = 2},
                                      {.tp = 4, .ep = 2, .etp = 2},
                                      {.dp_shard = 2, .cp = 2, .tp = 2, .ep = 4, .etp = 2},
                                      {.dp_replicate = 2, .cp = 2, .tp = 2, .ep = 4}};
  const AnyConfig& model = variants()[GetParam()].config;
  int number = 0;
  for (const auto& mesh : meshes) {
    ++number;
    if (mesh.cp > 1 && !models::facts(model).takes_cp()) continue;
    // In `make test` each variant takes some of the meshes, and its neighbours take others.
    if (!is_long() && (static_cast<size_t>(number) + GetParam()) % 3 != 0) continue;
    // Every other mesh takes the other ways.
    const bool sequence_parallel = number % 2 == 0, reshard = number % 3 == 1;
    const std::string recompute = std::array{"full", "none", "selective"}[number % 3U];
    config::Settings settings = verify::verify_defaults(2);
    for (const auto& more : {config::mesh_settings(mesh, "test"), test_settings()})
      settings.insert(settings.end(), more.begin(), more.end());
    const config::Origin test{"test"};
    settings.push_back({"training.seed", std::int64_t{7}, test});
    settings.push_back({"optimizer.lr", 0.01, test});
    settings.push_back({"parallelism.sequence_parallel", sequence_parallel, test});
    settings.push_back({"parallelism.fsdp_reshard_after_forward", reshard, test});
    settings.push_back({"activation_checkpoint.mode", recompute, test});
    const verify::VerifyCase c{config::merged(settings, config::RequestedModel{model, "test"})};
    const auto report = verify::verify(c, verify::run_reference(c));
    EXPECT_TRUE(report.holds()) << report.describe(mesh);
  }
}

// Memory for time, and not a bit of the result; in every dtype and with every kind of kernel that a
// model has on this device.
TEST(RecomputeOfModels, GivesTheSameBits) {
  for (const auto& name : models::model_names())
    for (const std::string dtype : {"float32", "bfloat16"}) {
      const auto result = [&](const std::string& mode) {
        config::Settings settings = verify::verify_defaults(2);
        for (const auto& s : test_settings()) settings.push_back(s);
        const config::Origin test{"test"};
        settings.push_back({"model.name", name, test});
        settings.push_back({"training.dtype", dtype, test});
        settings.push_back({"training.gradient_accumulation_steps", std::int64_t{2}, test});
        const auto config = config::merged(settings);
        const auto world = comm::solo_group();
        const Mesh mesh(*world, {});
        const MeshScope scope(mesh);
        const auto model = train::make_model(config);
        const auto data = train::open_dataset(config);
        auto options = train::step_options(config);
        options.forward.recompute = mode == "full"        ? models::Recompute::full
                                    : mode == "selective" ? models::Recompute::selective
                                                          : models::Recompute::none;
        train::accumulate_gradients(*model, train::step_batches(config, *data, mesh, 0), options);
        std::vector<at::Tensor> gradients;
        model->each_param([&](Stored& w, bool) { gradients.push_back(w.value.grad().clone()); });
        return gradients;
      };
      const auto kept = result("none");
      for (const std::string mode : {"selective", "full"}) {
        const auto again = result(mode);
        ASSERT_EQ(kept.size(), again.size());
        for (size_t i = 0; i < kept.size(); ++i)
          EXPECT_TRUE(at::equal(kept[i], again[i])) << name << ", " << dtype << ", " << mode << i;
      }
    }
}

// With every promise looked at: values that are R or I are compared over the ranks, and so are the
// calls.
TEST(Checked, EveryModelKeepsItsPromises) {
  bool takes_first = false;  // in `make test` every model takes one of the two ways
  for (const auto& name : models::model_names()) {
    takes_first = !takes_first;
    for (bool sequence_parallel : {false, true}) {
      if (!is_long() && sequence_parallel != takes_first) continue;
      MeshShape mesh = sequence_parallel ? MeshShape{.cp = 2, .tp = 2, .ep = 2, .etp = 2}
                                         : MeshShape{.dp_replicate = 2, .tp = 2, .ep = 2};
      if (!models::facts(models::built_in(name, "tiny")).takes_cp())
        mesh.dp_shard = std::exchange(mesh.cp, 1);
      config::Settings settings = verify::verify_defaults(1);
      for (const auto& more : {config::mesh_settings(mesh, "test"), test_settings()})
        settings.insert(settings.end(), more.begin(), more.end());
      const config::Origin test{"test"};
      settings.push_back({"model.name", name, test});
      settings.push_back({"debug.checked", true, test});
      settings.push_back({"parallelism.sequence_parallel", sequence_parallel, test});
      const verify::VerifyCase c{config::merged(settings), 1};
      const auto report = verify::verify(c, verify::run_reference(c));
      EXPECT_TRUE(report.holds()) << name << ": " << report.describe(mesh);
    }
  }
}

// A norm of the residual stream that one tp rank has otherwise, with and without sequence
// parallelism.
TEST(Checked, FindsANormThatDiffersOverTp) {
  for (bool sequence_parallel : {false, true}) {
    auto options = test_options();
    options.checked = true;
    const auto run = [&] {
      comm::launch(
          2,
          [&](comm::Group& world) {
            const Mesh mesh(world, {.tp = 2, .ep = 2});
            const MeshScope scope(mesh);
            const auto model = models::make_model(models::built_in("qwen3_moe", "tiny"),
                                                  {.dtype = at::kDouble, .device = test_device()});
            model->each_param([&](Stored& w, bool) {
              const at::NoGradGuard no_grad;
              if (w.spec.name == "model.layers.1.post_attention_layernorm.weight" &&
                  world.rank() == 1)
                w.value[0] += 1e-9;
            });
            const at::Tensor ids = at::arange(8).reshape({1, 8}).to(test_device());
            model->forward({.input_ids_BL = ids, .labels_BL = ids},
                           {.sequence_parallel = sequence_parallel});
          },
          options);
    };
    expect_parts(error_of(run, ErrorKind::comm),
                 {"'model.layers.1.post_attention_layernorm.weight' is "
                  "promised to be the same",
                  "rank 1 holds a different value from rank 0"});
  }
}

// What travels between cp ranks is the latent and the one rotated key, not the keys and values of
// all heads that come of them.
TEST(Mla, SendsTheLatentBetweenCpRanks) {
  const auto config = models::built_in<models::DeepseekV3Config>("tiny");
  constexpr std::int64_t B = 2, L = 4;  // of each rank
  comm::launch(
      2,
      [&](comm::Group& world) {
        const Mesh mesh(world, {.cp = 2});
        const MeshScope scope(mesh);
        const auto model =
            models::make_model(config, {.dtype = at::kDouble, .device = test_device()});
        std::map<std::int64_t, std::int64_t> expected;  // bytes of a gather -> how often
        model->each_param(
            [&](Stored& w, bool) { ++expected[static_cast<std::int64_t>(w.value.nbytes())]; });
        expected[B * L * config.kv_lora_rank * 8] += config.num_layers;
        expected[B * L * config.qk_rope_dim * 8] += config.num_layers;
        const at::Tensor ids = at::arange(B * 2 * L).reshape({B, 2 * L}).to(test_device());
        const comm::Trace trace;
        model->forward({.input_ids_BL = ids, .labels_BL = ids}, {});
        std::map<std::int64_t, std::int64_t> found;
        for (const auto& e : trace.entries()) {
          EXPECT_EQ(e.op, comm::Collective::all_gather);
          ++found[e.bytes];
        }
        EXPECT_EQ(found, expected) << "the shards of the parameters, and the latents";
      },
      test_options());
}

// The loss and the gradients of one step on one rank, by name.
std::map<std::string, at::Tensor> gradients_of(models::Model& model, const at::Tensor& ids) {
  const models::MicroBatch batch{.input_ids_BL = ids.narrow(1, 0, 6),
                                 .labels_BL = ids.narrow(1, 1, 6),
                                 .num_step_tokens = at::full({}, 12, at::kDouble)};
  const auto result = model.forward(batch, {});
  backward(result.loss);
  std::map<std::string, at::Tensor> all{{"loss", local(result.loss).detach()}};
  model.each_param([&](Stored& w, bool) { all[w.spec.name] = w.value.grad(); });
  return all;
}

// One parameter in two places has the sum of both gradients.
TEST(TiedEmbedding, GetsBothGradients) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  auto config = models::built_in<MixtralConfig>("tiny");
  const models::ModelOptions options{.dtype = at::kDouble, .seed = 2};
  const auto untied = models::make_model(config, options);
  config.tie_embeddings = true;
  const auto tied = models::make_model(config, options);
  EXPECT_EQ(untied->num_parameters() - tied->num_parameters(), config.vocab * config.dim);

  at::Tensor embedding;
  untied->each_param([&](Stored& w, bool) {
    const at::NoGradGuard no_grad;
    if (w.spec.name == "model.embed_tokens.weight") embedding = w.value;
    if (w.spec.name == "lm_head.weight") w.value.copy_(embedding);
  });
  const at::Tensor ids = at::randint(config.vocab, {2, 7}, at::kLong);
  const auto a = gradients_of(*untied, ids), b = gradients_of(*tied, ids);
  EXPECT_TRUE(at::allclose(a.at("loss"), b.at("loss")));
  EXPECT_FALSE(b.contains("lm_head.weight"));
  EXPECT_TRUE(at::allclose(b.at("model.embed_tokens.weight"),
                           a.at("model.embed_tokens.weight") + a.at("lm_head.weight")));
  EXPECT_TRUE(at::allclose(b.at("model.layers.0.self_attn.q_proj.weight"),
                           a.at("model.layers.0.self_attn.q_proj.weight")));
}

// Each factor of a Granite MoE is one that its weights could have, and enters once.
TEST(Factors, AreThoseOfTheWeights) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const models::ModelOptions options{.dtype = at::kDouble, .seed = 2};
  auto config = models::built_in<GraniteMoeConfig>("tiny");
  const auto with = models::make_model(config, options);
  const std::map<std::string, double> factors{
      {"embed_tokens.weight", std::exchange(config.embedding_multiplier, 1)},
      {"q_proj.weight", std::exchange(config.attention_multiplier, 1)},
      {"o_proj.weight", config.residual_multiplier},
      {"experts.w2", std::exchange(config.residual_multiplier, 1)},
      {"lm_head.weight", 1 / std::exchange(config.logits_scaling, 1)}};
  const auto without = models::make_model(config, options);
  std::size_t num_scaled = 0;
  without->each_param([&](Stored& w, bool) {
    for (const auto& [name, factor] : factors)
      if (w.spec.name.ends_with(name)) w.value.detach().mul_(factor), ++num_scaled;
  });
  EXPECT_EQ(num_scaled, 2 + 3 * static_cast<std::size_t>(config.num_layers));
  const at::Tensor ids = (at::arange(14) * 5).remainder(config.vocab).reshape({2, 7});
  const auto a = gradients_of(*with, ids), b = gradients_of(*without, ids);
  EXPECT_NEAR(a.at("loss").item<double>(), b.at("loss").item<double>(), 1e-12);
  for (const auto& [name, gradient] : a) {
    double factor = 1;
    for (const auto& [of, f] : factors)
      if (name.ends_with(of)) factor = f;
    EXPECT_TRUE(at::allclose(gradient, factor * b.at(name), 1e-9, 1e-14)) << name;
  }
}

}  // namespace
}  // namespace moesh
