// The model that docs/own_model.md adds, as the page has it (docs.pages compares the lines): it
// computes what GLM-4.5's decoder computes with whole heads rotated and a norm on each of q and k.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/fsdp/fsdp.h"
#include "moesh/models/config_json.h"
#include "moesh/models/registry.h"
#include "tests/spmd/device.h"
#include "tests/support.h"

namespace moesh::models {
namespace {

struct Dots1Config : GroupedDecoderConfig, DeepseekMoe {
  static constexpr const char* kName = "dots1";  // --model dots1:tiny
  static constexpr const char *kModelType = "dots1",
                              *kArchitecture = "Dots1ForCausalLM";  // in config.json
  static std::vector<BuiltIn<Dots1Config>> built_in();              // "tiny", "142b-a14b"
  ModelKeys keys();          // what [model] of a TOML file may set, with help texts
  ModelFacts facts() const;  // limits that a mesh must respect; here: it has an expert bias
  std::optional<BrokenRule> broken_rule() const;  // what its keys must fulfil together
  DecoderPlan plan() const;
  void fields(ConfigJson& json);  // of its config.json
};

std::vector<BuiltIn<Dots1Config>> Dots1Config::built_in() {
  Dots1Config tiny;
  tiny.init_std = 0.2, tiny.routed_scale = 2.5;
  return {{"tiny", tiny}};
}

ModelKeys Dots1Config::keys() {
  ModelKeys all = GroupedDecoderConfig::keys();
  const ModelKeys of_moe = moe_keys();
  all.insert(all.end(), of_moe.begin(), of_moe.end());
  return all;
}

ModelFacts Dots1Config::facts() const {
  ModelFacts facts = GroupedDecoderConfig::facts();
  add_to(facts);
  return facts;
}

std::optional<BrokenRule> Dots1Config::broken_rule() const {
  if (const auto broken = GroupedDecoderConfig::broken_rule()) return broken;
  return broken_moe_rule(*this);
}

DecoderPlan Dots1Config::plan() const {
  DecoderPlan plan{.config = *this};
  plan.attention = [c = *this](std::int64_t, const std::string& name, const nn::ModuleOptions& o) {
    nn::GroupedAttentionConfig attention = c.attention();
    attention.qk_norm = nn::QkNorm::weighted;
    return std::make_unique<nn::GroupedAttention>(attention, name, o);
  };
  add_to(plan);  // DeepseekMoe
  return plan;
}

constexpr MeshShape kMeshes[] = {{}, {.tp = 2, .ep = 2}, {.dp_shard = 2, .cp = 2, .ep = 2}};

void Dots1Config::fields(ConfigJson& json) {
  grouped_fields(json, {.num_experts = "n_routed_experts"}, *this);
  json.count("moe_intermediate_size", moe_ffn);
  moe_fields(json, num_layers, *this);
}

// What this rank's tokens add to the loss.
double loss_of(Model& model) {
  const at::Tensor ids = (at::arange(14) * 5).remainder(96).reshape({2, 7}).to(test_device());
  const MicroBatch batch{.input_ids_BL = ids,
                         .labels_BL = (ids + 1).remainder(96),
                         .num_step_tokens = at::full({}, 28, at::kDouble)};
  return model.forward(batch, {}).loss.local().item<double>();
}

TEST(OwnModel, OfThePageIsGlmWithWholeHeadsRotated) {
  Dots1Config dots = built_in<Dots1Config>("tiny");
  EXPECT_GT(dots.keys().size(), GroupedDecoderConfig(dots).keys().size());
  EXPECT_FALSE(dots.broken_rule());
  EXPECT_TRUE(dots.facts().stores_expert_bias);
  ConfigJson written;
  dots.fields(written);
  Dots1Config read_back;
  read_back.moe_ffn = 0, read_back.routed_scale = 0;
  ConfigJson reads{JsonValue{written.written()}};
  read_back.fields(reads);
  EXPECT_EQ(read_back.moe_ffn, dots.moe_ffn);
  EXPECT_EQ(read_back.routed_scale, dots.routed_scale);
  Glm4MoeConfig glm = built_in<Glm4MoeConfig>("tiny");
  glm.rotary_dim = 0, glm.attention_bias = false, glm.norm_eps = dots.norm_eps;
  for (const MeshShape& shape : kMeshes)
    comm::launch(
        shape.num_ranks(),
        [&](comm::Group& world) {
          const Mesh mesh(world, shape);
          const MeshScope scope(mesh);
          const ModelOptions options{.dtype = at::kDouble, .device = test_device(), .seed = 3};
          const auto ours = make_decoder(dots.plan(), options), theirs = make_model(glm, options);
          const double loss = loss_of(*ours);
          if (world.size() == 1) EXPECT_GT(loss, 1);
          EXPECT_EQ(loss, loss_of(*theirs));
        },
        test_options());
}

}  // namespace
}  // namespace moesh::models
