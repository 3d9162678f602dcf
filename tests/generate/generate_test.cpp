// What is kept of the tokens before gives the logits of the whole sequence, and a token costs one
// row.

#include "moesh/generate/generate.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <atomic>

#include "moesh/config/merge.h"
#include "moesh/fsdp/fsdp.h"
#include "tests/support.h"

namespace moesh::generate {
namespace {

constexpr std::int64_t kLength = 11, kPrompt = 4;
const char* const kModels[] = {"deepseek_v3",   "qwen3_moe",  "mixtral",    "llama4",
                               "gpt_oss",       "qwen2_moe",  "olmoe",      "glm4_moe",
                               "glm4_moe_lite", "minimax_m2", "granitemoe", "qwen3_next"};

bool takes(const std::string& model, const MeshShape& shape) {
  return shape.cp == 1 || models::facts(models::built_in(model, "tiny")).takes_cp();
}

Config config_of(const std::string& model, const MeshShape& shape = {}, bool sp = true) {
  const config::Origin origin{"test"};
  config::Settings settings = config::mesh_settings(shape, "test");
  settings.insert(settings.end(), {{"model.name", model, origin},
                                   {"model.size", std::string("tiny"), origin},
                                   {"training.dtype", std::string("float64"), origin},
                                   {"data.sequence_length", kLength, origin},
                                   {"parallelism.sequence_parallel", sp, origin}});
  if (model == "mixtral") settings.push_back({"model.window", std::int64_t{5}, origin});
  return config::merged(settings);
}

at::Tensor some_ids() { return (at::arange(kLength) * 31 + 7).remainder(96).unsqueeze(0); }

struct Logits : nn::Probe {
  at::Tensor all_BLV;
  bool wants_logits() const override { return true; }
  void on_logits(const at::Tensor& logits_BLV) override { all_BLV = logits_BLV; }
};

template <class F>
void on_mesh(const MeshShape& shape, const F& f) {
  comm::launch(shape.num_ranks(), [&](comm::Group& world) {
    const Mesh mesh(world, shape);
    const MeshScope scope(mesh);
    f(world);
  });
}

// The logits of every position, on one rank, from one pass without anything kept.
at::Tensor whole_logits(const std::string& name) {
  const Config config = config_of(name);
  at::Tensor all_LV;
  on_mesh({}, [&](comm::Group&) {
    const auto model = train::make_model(config);
    Logits probe;
    models::ForwardOptions options = train::step_options(config).forward;
    options.probe = &probe, options.pass = nn::Pass::evaluation;
    const at::NoGradGuard no_grad;
    model->forward({.input_ids_BL = some_ids(), .labels_BL = some_ids()}, options);
    all_LV = probe.all_BLV[0].clone();
  });
  return all_LV;
}

void expect_logits_of_the_whole(const MeshShape& shape, bool sp = true) {
  for (const std::string name : kModels) {
    if (!takes(name, shape)) continue;
    const at::Tensor wanted_LV = whole_logits(name);
    const Config config = config_of(name, shape, sp);
    on_mesh(shape, [&](comm::Group&) {
      const auto model = train::make_model(config);
      nn::ModelKvCache kv_cache;
      for (std::int64_t begin = 0, end = kPrompt; end <= kLength; begin = end, ++end) {
        const at::Tensor found_V =
            model->next_logits(some_ids().narrow(1, begin, end - begin), kv_cache,
                               train::step_options(config).forward)[0];
        const double error = (found_V - wanted_LV[end - 1]).abs().max().item<double>();
        EXPECT_LT(error, 1e-11) << name << " on " << shape.describe() << ", token " << end;
      }
    });
  }
}

TEST(KvCache, GivesTheLogitsOfTheWholeOnOneRank) { expect_logits_of_the_whole({}); }
TEST(KvCache, GivesTheLogitsOfTheWholeUnderTp) {
  expect_logits_of_the_whole({.tp = 2, .ep = 2});
  expect_logits_of_the_whole({.tp = 4, .ep = 2, .etp = 2});
}
TEST(KvCache, GivesTheLogitsOfTheWholeUnderCp) {
  expect_logits_of_the_whole({.cp = 2});
  expect_logits_of_the_whole({.cp = 3});
  expect_logits_of_the_whole({.cp = 2, .tp = 2, .ep = 2});
}
TEST(KvCache, GivesTheLogitsOfTheWholeUnderFsdpAndWithoutSequenceParallelism) {
  expect_logits_of_the_whole({.dp_shard = 2, .ep = 2});
  expect_logits_of_the_whole({.cp = 2, .tp = 2, .etp = 2}, /*sp=*/false);
}

struct Rows : nn::Probe {
  std::atomic<std::int64_t>* num_rows;
  explicit Rows(std::atomic<std::int64_t>* count) : num_rows(count) {}
  at::Tensor on_choice(const nn::Choice& choice) override {
    *num_rows += choice.experts_NK.size(0);
    return choice.experts_NK;
  }
};

// Rows of all ranks and MoE layers in each call: the prompt, and then one token after the other.
std::vector<std::int64_t> rows_of_calls(const std::string& name, const MeshShape& shape) {
  const Config config = config_of(name, shape);
  std::vector<std::int64_t> rows;
  std::atomic<std::int64_t> num_rows = 0;
  on_mesh(shape, [&](comm::Group& world) {
    const auto model = train::make_model(config);
    Rows probe(&num_rows);
    models::ForwardOptions options = train::step_options(config).forward;
    options.probe = &probe;
    nn::ModelKvCache kv_cache;
    for (std::int64_t begin = 0, end = kPrompt; end <= kLength; begin = end, ++end) {
      world.barrier();
      if (world.rank() == 0) num_rows = 0;
      world.barrier();
      model->next_logits(some_ids().narrow(1, begin, end - begin), kv_cache, options);
      world.barrier();
      if (world.rank() == 0) rows.push_back(num_rows);
    }
  });
  return rows;
}

TEST(KvCache, ATokenCostsOneRowOfEachLayer) {
  for (const std::string name : kModels)
    for (const MeshShape& shape : {MeshShape{}, MeshShape{.cp = 2, .tp = 2, .ep = 2}}) {
      if (!takes(name, shape)) continue;
      const auto rows = rows_of_calls(name, shape);
      ASSERT_EQ(rows.size(), 1u + kLength - kPrompt);
      const std::int64_t num_layers = rows[0] / kPrompt;
      EXPECT_GT(num_layers, 0);
      EXPECT_EQ(rows[0], num_layers * kPrompt) << name;
      for (size_t i = 1; i < rows.size(); ++i)
        EXPECT_EQ(rows[i], num_layers) << name << " on " << shape.describe() << ", token " << i;
    }
}

std::vector<std::int64_t> kept_after_all(const std::string& name) {
  std::vector<std::int64_t> kept;
  const Config config = config_of(name);
  on_mesh({}, [&](comm::Group&) {
    const auto model = train::make_model(config);
    nn::ModelKvCache kv_cache;
    for (std::int64_t i = 0; i < kLength; ++i)
      model->next_logits(some_ids().narrow(1, i, 1), kv_cache, train::step_options(config).forward);
    EXPECT_EQ(kv_cache.num_tokens, kLength);
    for (const auto& layer : kv_cache.layers) kept.push_back(layer.kept().end - layer.kept().begin);
  });
  return kept;
}

TEST(KvCache, KeepsNoMoreThanLaterTokensSee) {
  using Counts = std::vector<std::int64_t>;
  EXPECT_EQ(kept_after_all("qwen3_moe"), (Counts{11, 11, 11}));
  EXPECT_EQ(kept_after_all("deepseek_v3"), (Counts{11, 11, 11}));
  EXPECT_EQ(kept_after_all("mixtral"), (Counts{4, 4, 4}));   // a window of 5, with the next token
  EXPECT_EQ(kept_after_all("gpt_oss"), (Counts{2, 11, 2}));  // of 3, in every second layer
  EXPECT_EQ(kept_after_all("llama4"),
            (Counts{2, 2, 2, 11}));  // chunks of 3: 9 and 10 of the fourth
}

std::vector<std::int64_t> ids_on(const std::string& name, const MeshShape& shape,
                                 const GenerateOptions& options) {
  const Config config = config_of(name, shape);
  std::vector<std::int64_t> ids;
  on_mesh(shape, [&](comm::Group& world) {
    const auto model = train::make_model(config);
    const auto mine = generate(*model, world, config, options).ids;
    // Every rank has them.
    const auto all = world.all_gather(at::tensor(mine, at::kLong)).reshape({world.size(), -1});
    EXPECT_TRUE(all.eq(all[0]).all().item<bool>());
    if (world.rank() == 0) ids = mine;
  });
  return ids;
}

TEST(Generate, GivesTheSameIdsOnEveryMesh) {
  for (const std::string name : kModels)
    for (const double temperature : {0.0, 0.8}) {
      const GenerateOptions options{
          .prompt = {5, 17, 3},
          .max_new_tokens = 9,
          .choose = {.temperature = temperature, .top_p = 0.95, .seed = 3}};
      const auto wanted = ids_on(name, {}, options);
      EXPECT_EQ(wanted.size(), 9u);
      for (const MeshShape& shape : {MeshShape{.tp = 2, .ep = 2}, MeshShape{.cp = 2, .ep = 2},
                                     MeshShape{.dp_replicate = 2, .dp_shard = 2, .ep = 2}})
        if (takes(name, shape))
          EXPECT_EQ(ids_on(name, shape, options), wanted) << name << " on " << shape.describe();
    }
}

TEST(Generate, StopsBehindATokenThatEndsTheText) {
  GenerateOptions options{.prompt = {5, 17, 3}, .max_new_tokens = 9};
  const auto all = ids_on("qwen3_moe", {}, options);
  options.stop = {all[3]};
  const auto first = std::find(all.begin(), all.end(), all[3]) - all.begin();
  EXPECT_EQ(ids_on("qwen3_moe", {}, options),
            std::vector<std::int64_t>(all.begin(), all.begin() + first + 1));
}

TEST(Generate, NamesWhatItCannotDo) {
  const auto error = [](const GenerateOptions& options) {
    return error_of([&] { ids_on("qwen3_moe", {}, options); }, ErrorKind::config);
  };
  expect_parts(error({.prompt = {}}), {"the prompt is empty"});
  expect_parts(error({.prompt = {1, 96}}), {"token 96", "vocabulary of 96"});
  expect_parts(error({.prompt = {1, 2, 3}, .max_new_tokens = 4096}),
               {"3 tokens and 4096", "4096 positions", "4094"});
  // A rank of a pipeline has some of the layers only.
  const Config config = config_of("qwen3_moe", {.pp = 2});
  on_mesh({.pp = 2}, [&](comm::Group&) {
    const auto model = train::make_model(config);
    nn::ModelKvCache kv_cache;
    const auto forward = train::step_options(config).forward;
    expect_parts(
        error_of([&] { model->next_logits(some_ids(), kv_cache, forward); }, ErrorKind::config),
        {"the next token needs the whole model", "pp is 2"});
    EXPECT_TRUE(kv_cache.layers.empty());
    expect_parts(
        error_of(
            [&] { model->forward({.input_ids_BL = some_ids(), .labels_BL = some_ids()}, forward); },
            ErrorKind::config),
        {"forward needs the whole model", "pp is 2"});
  });
}

}  // namespace
}  // namespace moesh::generate
