// The model that docs/own_model.md adds, as the page has it (docs.pages compares the lines),
// against transformers' Dots1: own_model_test.py makes a random folder and says in MOESH_DOTS1
// where it is.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>

#include "moesh/base/error.h"
#include "moesh/checkpoint/load.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/models/config_json.h"
#include "moesh/models/disk.h"
#include "moesh/train/checkpointer.h"
#include "moesh/train/step.h"
#include "tests/spmd/device.h"

namespace moesh::models {
namespace {

struct Dots1Config : GroupedDecoderConfig, DeepseekMoe {
  // --model dots1:tiny; model_type and architecture in config.json
  static constexpr ModelNames kNames{"dots1", "dots1", "Dots1ForCausalLM"};
  static std::vector<BuiltIn<Dots1Config>> built_in();  // "tiny", "142b-a14b"
  ModelKeys keys();          // what [model] of a TOML file may set, with help texts
  ModelFacts facts() const;  // limits that a mesh must respect; here: it has an expert bias
  std::optional<BrokenRule> broken_rule() const;  // what its keys must fulfil together
  DecoderPlan plan() const;
  void fields(ConfigJson& json);  // of its config.json
};

std::vector<BuiltIn<Dots1Config>> Dots1Config::built_in() {
  Dots1Config tiny;
  tiny.init_std = 0.2, tiny.routed_scale = 2.5;

  Dots1Config large;
  large.vocab = 152064, large.dim = 4096, large.num_layers = 62, large.num_heads = 32;
  large.num_kv_heads = 32, large.head_dim = 128, large.norm_eps = 1e-5, large.rope.theta = 1e7;
  large.ffn = 10944, large.moe_ffn = 1408, large.num_experts = 128, large.top_k = 6;
  large.num_shared = 2, large.routed_scale = 2.5, large.max_sequence = 32768;
  return {{"tiny", tiny}, {"142b-a14b", large}};
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
  DecoderPlan plan =
      grouped_plan(*this, [](nn::GroupedAttentionConfig& attention, std::int64_t /*layer*/) {
        attention.qk_norm = nn::QkNorm::weighted;
      });
  add_to(plan);  // DeepseekMoe
  return plan;
}

void Dots1Config::fields(ConfigJson& json) {
  grouped_fields(json, {.num_experts = "n_routed_experts"}, *this);
  json.require("attention_bias", {false});
  json.require("use_sliding_window", {false});
  json.count("moe_intermediate_size", moe_ffn);
  moe_fields(json, num_layers, *this);
}

std::filesystem::path folder() {
  const char* of_python = std::getenv("MOESH_DOTS1");
  MOESH_CHECK(of_python, ErrorKind::config, "MOESH_DOTS1 is not set: run own_model_test.py");
  return of_python;
}

Dots1Config read_config() {
  Dots1Config config;
  ConfigJson json(formats::parse_json(checkpoint::read_config(folder()), "config.json"));
  config.fields(json);
  return config;
}

// A registered model finds its tensors by its own configuration. Those of this one have the names
// and shapes of GLM-4.5's.
formats::DiskTable tensors_of(const Dots1Config& dots) {
  Glm4MoeConfig glm;
  static_cast<GroupedDecoderConfig&>(glm) = dots;
  static_cast<DeepseekMoe&>(glm) = dots;
  glm.qk_norm = true;
  return on_disk(glm).table(formats::ExpertLayout::per_expert);
}

// What transformers computed.
struct Golden {
  at::Tensor input_ids, labels, logits, loss;
  std::map<std::string, at::Tensor> gradients;  // by the names of moesh
};

Golden read_golden(const Dots1Config& config) {
  const auto source = checkpoint::TensorFolder::of_file(folder() / "golden.safetensors");
  const auto tensor = [&](const std::string& name) {
    const auto& found = source.tensors().at(name);
    const at::Tensor t =
        at::empty(found.info->shape, checkpoint::torch_dtype(found.info->dtype, name));
    found.file->file().read(found.file->file().header().data_start + found.info->begin,
                            {static_cast<std::byte*>(t.data_ptr()), t.nbytes()});
    return t;
  };
  Golden golden{tensor("input_ids"), tensor("labels"), tensor("logits"), tensor("loss"), {}};
  auto table = tensors_of(config);
  std::erase_if(table.tensors,
                [](const auto& t) { return t.name.ends_with(".e_score_correction_bias"); });
  for (auto& t : table.tensors) t.name = "grad." + t.name;
  table.ignored = [](std::string_view name) { return !name.starts_with("grad."); };
  checkpoint::check_names(source, table);
  std::vector<checkpoint::TensorPart> parts;
  const OneRankScope scope;
  Model(config.plan(), {.device = at::kMeta}).each_param([&](Stored& w, bool) {
    const auto& shape = w.spec.shape;
    const at::Tensor& whole = golden.gradients[w.spec.name] = at::empty(shape, at::kDouble);
    parts.push_back(
        {w.spec.name, shape, {std::vector<std::int64_t>(shape.size(), 0), shape}, false, whole});
  });
  checkpoint::Loader(source, table).load(parts);
  return golden;
}

struct Logits : nn::Probe {
  at::Tensor all_BLV;
  bool wants_logits() const override { return true; }
  void on_logits(const at::Tensor& logits_BLV) override { all_BLV = logits_BLV.detach().cpu(); }
};

at::Tensor slice(at::Tensor x, const Region& r) {
  for (std::size_t d = 0; d < r.start.size(); ++d)
    x = x.narrow(static_cast<std::int64_t>(d), r.start[d], r.length[d]);
  return x;
}

void expect_close(const at::Tensor& found, const at::Tensor& wanted, const std::string& what) {
  const double error = (found - wanted).abs().max().item<double>();
  EXPECT_LE(error, 1e-9 * std::max(1.0, wanted.abs().max().item<double>())) << what;
}

// Loss and gradients on a mesh, and where a rank has all of them the logits.
void expect_golden(const MeshShape& shape, const Dots1Config& config, const Golden& golden) {
  std::mutex one_by_one;
  comm::launch(
      shape.num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, shape);
        const MeshScope scope(mesh);
        Model model(config.plan(), {.dtype = at::kDouble, .device = test_device()});
        const auto source = checkpoint::TensorFolder::weights(folder());
        const auto table = tensors_of(config);
        checkpoint::check_names(source, table);
        checkpoint::Loader(source, table).load(train::weight_parts(model));
        const std::int64_t batch = golden.input_ids.size(0) / (shape.dp_replicate * shape.dp_shard);
        const auto own = [&](const at::Tensor& t) {
          return t.narrow(0, mesh.coordinate(dp) * batch, batch).to(test_device());
        };
        Logits probe;
        train::StepOptions options;
        options.forward.probe = &probe;
        const auto found = train::accumulate_gradients(
            model, {{.input_ids_BL = own(golden.input_ids), .labels_BL = own(golden.labels)}},
            options);
        std::map<std::string, at::Tensor> gradients;
        model.each_param([&](Stored& w, bool) {
          gradients[w.spec.name] = raw::gather(w, raw::gradient(w)).cpu();
        });
        const std::lock_guard lock(one_by_one);
        const std::string on = " on " + shape.describe();
        EXPECT_NEAR(found.loss, golden.loss.item<double>(), 1e-9) << on;
        if (world.size() == 1) expect_close(probe.all_BLV, golden.logits, "logits");
        model.each_param([&](Stored& w, bool) {
          expect_close(gradients.at(w.spec.name),
                       slice(golden.gradients.at(w.spec.name), w.compute), w.spec.name + on);
        });
      },
      test_options());
}

TEST(OwnModel, OfThePageIsThatOfTransformers) {
  const Dots1Config config = read_config();
  EXPECT_FALSE(config.broken_rule());
  const Golden golden = read_golden(config);
  for (const MeshShape& shape :
       {MeshShape{}, MeshShape{.tp = 2, .ep = 2}, MeshShape{.dp_shard = 2, .cp = 2, .ep = 2}})
    expect_golden(shape, config, golden);
}

TEST(OwnModel, OfThePageWritesWhatItReads) {
  Dots1Config config = read_config(), read_back;
  ConfigJson written;
  config.fields(written);
  ConfigJson reads{JsonValue{written.written()}};
  read_back.fields(reads);
  const ModelKeys ours = config.keys(), theirs = read_back.keys();
  ASSERT_EQ(ours.size(), theirs.size());
  EXPECT_GT(ours.size(), GroupedDecoderConfig(config).keys().size());
  for (std::size_t i = 0; i < ours.size(); ++i)
    std::visit(
        [&](const auto* a, const auto* b) {
          if constexpr (std::same_as<decltype(a), decltype(b)>) EXPECT_EQ(*a, *b) << ours[i].name;
        },
        ours[i].target, theirs[i].target);
}

// As transformers counts them for the published config.json.
TEST(OwnModel, OfThePageHasThePublishedSize) {
  const OneRankScope scope;
  const Dots1Config config = built_in<Dots1Config>("142b-a14b");
  EXPECT_TRUE(config.facts().stores_expert_bias);
  const Model model(config.plan(), {.dtype = at::kBFloat16, .device = at::kMeta});
  EXPECT_EQ(model.num_parameters(), 142'774'373'888);
}

}  // namespace
}  // namespace moesh::models
