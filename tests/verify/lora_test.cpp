// LoRA on whole models: meshes compute what one rank does, what is added is w + alpha / r B A, only
// that is trained and saved, and what makes no sense is refused. tests/models/peft_test.py compares
// with PEFT.

#include <c10/util/accumulate.h>
#include <gtest/gtest.h>

#include <fstream>
#include <mutex>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/comm/launch.h"
#include "moesh/models/adapter.h"
#include "moesh/train/build.h"
#include "moesh/verify/verify_all.h"
#include "tests/checkpoint/support.h"
#include "tests/expect_error.h"
#include "tests/train/lora_check.h"

namespace moesh::verify {
namespace {

struct LoraCase {
  std::string model, mesh;
  Args more = {};
};

class LoraOnMeshes : public testing::TestWithParam<LoraCase> {};
INSTANTIATE_TEST_SUITE_P(
    All, LoraOnMeshes,
    testing::Values(
        LoraCase{"deepseek_v3", "dp_shard=2,tp=2,ep=2", {"--activation_checkpoint.mode=selective"}},
        LoraCase{"qwen3_moe",
                 "pp=2,tp=2",
                 {"--parallelism.pipeline_parallel_schedule=zero_bubble",
                  "--training.gradient_accumulation_steps=3"}},
        LoraCase{"mixtral", "tp=2,etp=2", {"--activation_checkpoint.mode=full"}},
        // The first stage has nothing to train, and more ranks store an expert than there are.
        LoraCase{"llama4",
                 "pp=2,dp_shard=2",
                 {"--model.num_layers=2", "--lora.targets=model.layers.1.*",
                  "--model.num_experts=1", "--model.top_k=1", "--lora.use_rslora=true"}},
        LoraCase{"gpt_oss",
                 "dp_replicate=2,cp=2",
                 {"--lora.rank_pattern=o_proj=5", "--lora.alpha_pattern=gate_up_proj=3"}}),
    [](const auto& info) { return info.param.model; });

TEST_P(LoraOnMeshes, ComputeWhatOneRankDoes) {
  const auto& [model, mesh, more] = GetParam();
  Args args{"--model",
            model + ":tiny",
            "--mesh",
            mesh,
            "--dtype",
            "float64",
            "--lora.rank",
            "3",
            "--lora.init_lora_weights=false"};
  args.insert(args.end(), more.begin(), more.end());
  const VerifyCase c{config::load_config(args, verify_defaults(2))};
  const auto report = verify(c, run_reference(c));
  EXPECT_TRUE(report.holds()) << report.describe(mesh_shape(c.config));
}

class LoraOf : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, LoraOf, testing::ValuesIn(models::model_names()),
                         [](const auto& info) { return info.param; });

TEST_P(LoraOf, AddsAlphaOverRankTimesBA) { EXPECT_EQ(lora_check::sum_complaint(GetParam()), ""); }
TEST_P(LoraOf, LiesInFoldersAsPeftHasIt) { EXPECT_EQ(lora_check::order_complaint(GetParam()), ""); }

Args lora_args(const char* steps) {
  return {"--model",
          "deepseek_v3:tiny",
          "--lora.rank=2",
          "--lora.dropout=0.3",
          "--lr_scheduler.kind=constant",
          steps};
}

TEST(LoraRun, SavesTheAdapterAloneAndGoesOn) {
  const TemporaryFolder folder;
  const auto at_once = folder.path() / "at_once", in_parts = folder.path() / "in_parts";
  run(at_once, "dp_shard=2", lora_args("--steps=4"));
  run(in_parts, "dp_shard=2", lora_args("--steps=2"));
  run(in_parts, "dp_shard=2", lora_args("--steps=4"));
  const auto last = checkpoint::step_name(4);
  const auto resumed = contents(in_parts / last);
  EXPECT_EQ(resumed.size(), 3u);  // adapter, its configuration, optimizer
  for (const auto& [name, bytes] : contents(at_once / last)) {
    ASSERT_TRUE(resumed.contains(name)) << name;
    EXPECT_TRUE(bytes == resumed.at(name)) << name << " of a resumed run differs";
    EXPECT_FALSE(name.starts_with("model")) << name;
    EXPECT_NE(name, "config.json");
    EXPECT_EQ(bytes.find("lm_head"), std::string::npos) << name;
  }
  // Another run begins with it, and no other model does.
  const auto adapter = "--lora.adapter=" + (at_once / last).string();
  run(folder.path() / "from_it", "dp_shard=2",
      {"--model", "deepseek_v3:tiny", "--steps=1", adapter});
  const auto error = [&](const Args& args, ErrorKind kind) {
    return error_of([&] { config::lora(config::load_config(args)); }, kind);
  };
  expect_parts(
      error({"--model", "mixtral:tiny", "--model.num_layers=1", adapter}, ErrorKind::data),
      {"tensors that are for no weight of the model", "it is the adapter of another model"});
  expect_parts(error({"--model", "deepseek_v3:tiny", adapter, "--lora.rank=4"}, ErrorKind::config),
               {"lora.rank is 4", "leave out lora.rank"});
  expect_parts(error({"--model", "deepseek_v3:tiny", "--lora.adapter=" + folder.path().string()},
                     ErrorKind::data),
               {"adapter_config.json", "is not a folder of a LoRA adapter"});
  // A run without LoRA does not go on from it.
  expect_parts(error_of([&] { run(at_once, "dp_shard=2", {"--model", "deepseek_v3:tiny"}); },
                        ErrorKind::config),
               {"was saved by a run with LoRA", "set lora.rank"});
}

TEST(LoraRun, RefusesWhatMakesNoSense) {
  const auto error = [](const Args& more) {
    Args args{"--model", "qwen3_moe:tiny"};
    args.insert(args.end(), more.begin(), more.end());
    return error_of([&] { config::load_config(args); }, ErrorKind::config);
  };
  expect_parts(error({"--lora.rank=0", "--lora.alpha=32"}),
               {"lora.alpha is 32", "lora.rank is 0", "set lora.rank to 1 or more"});
  expect_parts(error({"--lora.rank=-1"}), {"lora.rank is -1", "0 or more"});
  expect_parts(error({"--lora.rank=4", "--lora.targets=q_prj"}),
               {"'q_prj'", "no weight", "q_proj", "experts.gate_up_proj", "all-linear"});
  expect_parts(error({"--lora.rank=4", "--lora.targets=lm_head"}), {"'lm_head'", "no weight"});
  expect_parts(error({"--lora.rank=4", "--lora.targets="}), {"lora.targets is empty"});
  expect_parts(error({"--lora.rank=4", "--lora.rank_pattern=q_proj"}),
               {"lora.rank_pattern is \"q_proj\"", "down_proj=4"});
  expect_parts(error({"--lora.rank=4", "--lora.rank_pattern=q_proj=0"}), {"rank of 1 or more"});
  expect_parts(error({"--lora.rank=4", "--lora.targets=q_proj,(a"}),
               {"lora.targets: \"(a\" is not a regular expression"});
  expect_parts(error({"--lora.rank=4", "--lora.rank_pattern=(a=2"}),
               {"lora.rank_pattern is", "\"(a\" is not a regular expression"});
  expect_parts(error({"--lora.rank=4", "--lora.alpha_pattern=(a=2"}),
               {"lora.alpha_pattern is", "\"(a\" is not a regular expression"});
  expect_parts(error({"--lora.rank=4", "--lora.alpha=0"}), {"lora.alpha is 0", "above 0"});
  expect_parts(error({"--lora.dropout=0.1"}), {"lora.dropout is 0.1", "there is no LoRA"});
  expect_parts(error({"--lora.rank=4", "--lora.dropout=1"}), {"lora.dropout is 1", "below 1"});
  expect_parts(error({"--lora.rank=4", "--lora.dropout=0.1", "--lora.targets=experts.down_proj"}),
               {"lora.dropout is 0.1", "only to routed experts", "name a dense layer"});
  // Weights in few bits are not trained themselves, and not every model has them.
  expect_parts(error({"--lora.base=stored"}),
               {"lora.base is \"stored\"", "lora.rank is 0", "float8 or MXFP4", "leave out"});
  expect_parts(error({"--lora.base=mxfp4", "--lora.rank=2"}), {"lora.base is \"mxfp4\"", "stored"});
  expect_parts(error_of(
                   [] {
                     train::quantization(config::load_config(
                         {"--model", "qwen3_moe:tiny", "--lora.rank=2", "--lora.base=stored"}));
                   },
                   ErrorKind::config),
               {"no weight of qwen3_moe", "checkpoint.initial_load"});
}

// What the parameters of the base take on each rank of a mesh: their bytes, and by this formula.
struct BaseBytes {
  double held = 0, wanted = 0;
};
BaseBytes base_bytes(const std::string& model, const std::string& mesh, const std::string& base) {
  const auto config =
      config::load_config({"--model", model, "--mesh", mesh, "--dtype=bfloat16", "--lora.rank=2",
                           "--lora.base=" + base, "--model.num_layers=2"});
  BaseBytes all;
  std::mutex mutex;
  comm::launch(mesh_shape(config).num_ranks(), [&](comm::Group& world) {
    const Mesh of_rank(world, mesh_shape(config));
    const MeshScope scope(of_rank);
    const auto parameters = train::make_model(config);
    const std::lock_guard lock(mutex);
    parameters->each_param([&](Stored& w, bool) {
      if (w.spec.trained) return;
      const auto numbers = static_cast<double>(c10::multiply_integers(w.shard.length));
      const bool is_mxfp4 = model.starts_with("gpt_oss") && w.spec.shape.size() == 3;
      const bool is_float8 = model.starts_with("deepseek") &&
                             (w.storage == efsdp || w.spec.name.find("_proj") != std::string::npos);
      all.held += static_cast<double>(raw::num_bytes_at_rest(w));
      const auto as_number = static_cast<double>(c10::elementSize(w.spec.of_work()));
      all.wanted += numbers * (base == "compute" ? as_number
                               : is_mxfp4        ? 17 / 32.0
                               : is_float8       ? 1 + 4 / (128.0 * 128)
                                                 : as_number);
    });
  });
  return all;
}

TEST(LoraBase, TakesTheBytesOfItsFiles) {
  // Widths of 256: whole blocks, also on a mesh.
  for (const char* model : {"deepseek_v3:debug", "gpt_oss:debug"})
    for (const char* mesh : {"tp=1", "dp_shard=2,ep=2"}) {
      const BaseBytes as_numbers = base_bytes(model, mesh, "compute"),
                      as_stored = base_bytes(model, mesh, "stored");
      EXPECT_EQ(as_numbers.held, as_numbers.wanted) << model << " " << mesh;
      // Scales of blocks that two ranks have a part of are on both.
      EXPECT_GE(as_stored.held, as_stored.wanted) << model << " " << mesh;
      EXPECT_LT(as_stored.held, 1.003 * as_stored.wanted) << model << " " << mesh;
      EXPECT_LT(as_stored.held, 0.75 * as_numbers.held) << model << " " << mesh;
    }
}

std::string logged;

TEST(LoraRun, WithoutTheDropoutOfItsAdapterSaysSo) {
  const TemporaryFolder folder;
  run(folder.path() / "run", "tp=1", lora_args("--steps=1"));
  const auto saved = folder.path() / "run" / checkpoint::step_name(1);
  std::string text = bytes_of(saved / "adapter_config.json");
  const std::string key = "\"lora_dropout\": ";
  const auto at = text.find(key);
  ASSERT_NE(at, std::string::npos) << text;
  std::ofstream(saved / "adapter_config.json")
      << text.replace(at, text.find(',', at) - at, key + "0.25");
  logged.clear();
  set_log_sink([](LogLevel, const std::string& line) { logged += line; });
  run(folder.path() / "other", "tp=1",
      {"--model", "deepseek_v3:tiny", "--steps=1", "--lora.adapter=" + saved.string()});
  set_log_sink(nullptr);
  expect_parts(logged, {"lora_dropout = 0.25, and lora.dropout is 0", "set lora.dropout to 0.25"});
}

// Layers whose inputs are cut over cp and tp, gathered in another order (shared experts), or of
// other ranks (kv_b), in steps that are cut otherwise on one rank.
class Dropped : public testing::TestWithParam<LoraCase> {};
INSTANTIATE_TEST_SUITE_P(
    All, Dropped,
    testing::Values(LoraCase{"deepseek_v3", "dp_shard=2,cp=2,tp=2,ep=2", {"--data.batch_size=2"}},
                    LoraCase{"qwen2_moe",
                             "dp_replicate=2,tp=3",
                             {"--parallelism.sequence_parallel=false", "--model.num_heads=6",
                              "--model.num_kv_heads=3", "--activation_checkpoint.mode=full"}},
                    LoraCase{"glm4_moe",
                             "pp=2,tp=2,ep=2",
                             {"--parallelism.moe_dispatcher=all_gather", "--data.batch_size=3",
                              "--activation_checkpoint.mode=selective"}},
                    LoraCase{"llama4",
                             "pp=2,cp=3",
                             {"--parallelism.pipeline_parallel_schedule=zero_bubble",
                              "--training.gradient_accumulation_steps=3"}}),
    [](const auto& info) { return info.param.model; });

TEST_P(Dropped, IsTheSameOnEveryMesh) {
  const auto& [model, mesh, more] = GetParam();
  Args args{"--model",           model + ":tiny", "--mesh",        mesh,
            "--dtype",           "float64",       "--lora.rank=3", "--lora.init_lora_weights=false",
            "--lora.dropout=0.4"};
  args.insert(args.end(), more.begin(), more.end());
  const VerifyCase c{config::load_config(args, verify_defaults(2))};
  const auto report = verify(c, run_reference(c));
  EXPECT_TRUE(report.holds()) << report.describe(mesh_shape(c.config));
}

// Only in training, and every time something else.
TEST(Dropped, IsNothingInAnEvaluation) {
  const at::NoGradGuard no_grad;
  const OneRankScope scope;
  const auto loss_of = [](const std::string& dropout, nn::Pass pass, std::int64_t position) {
    const auto config = config::load_config(
        {"--model=qwen3_moe:tiny", "--dtype=float64", "--lora.rank=3",
         "--lora.init_lora_weights=false", "--lora.dropout=" + dropout, "--data.batch_size=2"},
        verify_defaults(1));
    const auto data = train::open_dataset(config);
    auto batch = train::step_batches(config, *data, current_mesh(), 0)[0];
    if (batch.samples_B.defined()) batch.samples_B.add_(position);
    return local(train::make_model(config)->forward(batch, {.pass = pass}).cross_entropy)
        .item<double>();
  };
  const double without = loss_of("0", nn::Pass::training, 0),
               with = loss_of("0.3", nn::Pass::training, 0);
  EXPECT_EQ(loss_of("0.3", nn::Pass::evaluation, 0), without);
  EXPECT_NE(with, without);
  EXPECT_EQ(loss_of("0.3", nn::Pass::recompute, 0), with);
  EXPECT_NE(loss_of("0.3", nn::Pass::training, 2), with);  // the next step
}

TEST(Dropped, AdaptersSayWhatPeftTakes) {
  const auto text = [](const std::string& targets) {
    const auto config = config::load_config({"--model=qwen3_moe:tiny", "--lora.rank=3",
                                             "--lora.dropout=0.25", "--lora.targets=" + targets});
    return models::adapter_config_json(config.model.architecture, config::lora(config), "base");
  };
  EXPECT_NE(text("q_proj,v_proj").find("\"lora_dropout\": 0.25"), std::string::npos);
  // PEFT has no dropout where it adds to parameters.
  EXPECT_EQ(text("all-linear").find("0.25"), std::string::npos);
}

TEST(LoraRun, AnAdapterThatIsNotWholeIsRefused) {
  const TemporaryFolder folder;
  run(folder.path() / "run", "tp=1", lora_args("--steps=1"));
  const auto saved = folder.path() / "run" / checkpoint::step_name(1);
  const auto config_text = bytes_of(saved / "adapter_config.json");
  const auto error = [&](const std::string& from, const std::string& to) {
    const auto copy = folder.path() / "copy";
    std::filesystem::create_directories(copy);
    std::filesystem::copy_file(saved / "adapter_model.safetensors",
                               copy / "adapter_model.safetensors",
                               std::filesystem::copy_options::overwrite_existing);
    std::string text = config_text;
    const auto found = text.find(from);
    EXPECT_NE(found, std::string::npos) << from << " in " << text;
    std::ofstream(copy / "adapter_config.json") << text.replace(found, from.size(), to);
    return error_of(
        [&] {
          run(folder.path() / "other", "tp=1",
              {"--model", "deepseek_v3:tiny", "--steps=1", "--lora.adapter=" + copy.string()});
        },
        ErrorKind::data);
  };
  expect_parts(error("\"LORA\"", "\"IA3\""), {"peft_type is 'IA3'", "LORA"});
  expect_parts(error("\"use_dora\": false", "\"use_dora\": true"),
               {"use_dora is true", "plain LoRA"});
  expect_parts(error("\"modules_to_save\": null", "\"modules_to_save\": [\"lm_head\"]"),
               {"modules_to_save", "plain LoRA"});
  expect_parts(error("\"r\": 2", "\"r\": 0"), {"r is 0", "1 or more"});
  expect_parts(error("\"r\": 2", "\"r\": 3"), {"of another shape", "lora_A"});
}

}  // namespace
}  // namespace moesh::verify
