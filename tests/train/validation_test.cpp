#include "moesh/train/validation.h"

#include <gtest/gtest.h>

#include "moesh/comm/launch.h"
#include "moesh/config/merge.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/train/loop.h"
#include "tests/support.h"

namespace moesh::train {
namespace {

using Args = std::vector<std::string>;

std::string sentences() {
  std::string text;
  for (int i = 0; i < 400; ++i) text += "sentence " + std::to_string(i * i) + "\n";
  return text;
}

Config config_with(const std::string& mesh, const std::string& path,
                   std::vector<std::string> more = {}) {
  std::vector<std::string> args{"--dtype=float64",
                                "--model.vocab_size=257",
                                "--mesh=" + mesh,
                                "--training.global_batch_size=8",
                                "--data.batch_size=2",
                                "--data.sequence_length=11",
                                "--data.path=" + path,
                                "--data.shuffle=false",
                                "--validation.interval=3",
                                "--validation.steps=2",
                                "--validation.source.0.path=" + path,
                                "--validation.source.0.name=held out"};
  args.insert(args.end(), more.begin(), more.end());
  return config::load_config(args);
}

// f(model, mesh) on every rank of the configuration's mesh.
template <class F>
void on_ranks(const Config& config, F f) {
  comm::launch(
      mesh_shape(config).num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, mesh_shape(config));
        const MeshScope scope(mesh);
        const auto model = make_model(config);
        f(*model, mesh, world);
      },
      launch_options(config));
}

// What training reports for the same sequences with the same weights, over all of their tokens; the
// same on every mesh.
TEST(Validation, IsTheLossOfTheSameSequencesInTraining) {
  const TemporaryFile text("held_out.txt", sentences());
  double expected = 0;
  const Config one = config_with("tp=1", text.path());
  on_ranks(one, [&](models::Model& model, const Mesh& mesh, comm::Group&) {
    const auto dataset = open_dataset(one);
    double sum = 0;
    std::int64_t tokens = 0;
    for (std::int64_t step = 0; step < 2; ++step) {
      const train::Gradients g = accumulate_gradients(
          model, step_batches(one, *dataset, mesh, 8 * step), step_options(one));
      sum += g.loss * static_cast<double>(g.num_tokens), tokens += g.num_tokens;
    }
    expected = sum / static_cast<double>(tokens);
  });
  EXPECT_GT(expected, 1);
  for (const std::string mesh : {"tp=1", "dp_shard=2,cp=2", "dp_shard=2,tp=2,ep=2,etp=2", "tp=4",
                                 "pp=3,dp_shard=2", "pp=2,tp=2"}) {
    const Config config = config_with(mesh, text.path(), {"--moe.balance_loss_weight=0.5"});
    const auto sets = open_validation(config);
    on_ranks(config, [&](models::Model& model, const Mesh& on, comm::Group&) {
      const auto losses = validate_model(model, config, on, sets);
      ASSERT_TRUE(losses);
      ASSERT_EQ(losses->size(), 1u);
      EXPECT_EQ(losses->at(0).name, "held out");
      EXPECT_NEAR(losses->at(0).loss, expected, 1e-10 * expected) << mesh;
    });
  }
}

// Experts that validation chooses do not count, and nothing has a gradient.
TEST(Validation, LeavesNoTrace) {
  const TemporaryFile text("held_out.txt", sentences());
  const Config config = config_with("tp=2,ep=2", text.path());
  const auto sets = open_validation(config);
  on_ranks(config, [&](models::Model& model, const Mesh& mesh, comm::Group& world) {
    validate_model(model, config, mesh, sets);
    for (auto* router : model.routers())
      EXPECT_EQ(world.all_reduce(local(router->pending_counts())).sum().item<std::int64_t>(), 0);
    model.each_param([](Stored& w, bool) { EXPECT_FALSE(w.value.grad().defined()); });
  });
}

// A file with fewer sequences than validation.steps asks for: each of them once, on every mesh, and
// the documents of best_fit sequences by themselves.
TEST(Validation, ReadsAFileOnceAndNotAgain) {
  std::string lines;
  for (int i = 0; i < 60; ++i) lines += "{\"text\": \"line " + std::to_string(i * i) + "\"}\n";
  const TemporaryFile file("held_out.jsonl", lines);
  for (const std::string packing : {"cut", "best_fit"}) {
    const Args more{"--validation.steps=100000", "--data.packing=" + packing};
    double expected = 0;
    const Config one = config_with("tp=1", file.path(), more);
    on_ranks(one, [&](models::Model& model, const Mesh&, comm::Group&) {
      const auto set = std::move(open_validation(one)[0].dataset);
      ASSERT_NE(*set->size() % 8, 0) << "the last step is not full";
      std::int64_t tokens = 0;
      for (std::int64_t i = 0; i < *set->size(); ++i) {
        const data::Batch b = data::make_batch(*set, i, 1);
        const models::MicroBatch batch{.input_ids_BL = b.input_ids_BL,
                                       .labels_BL = b.labels_BL,
                                       .documents = {b.document_starts_BL, b.num_documents}};
        expected += local(model.forward(batch, {.pass = nn::Pass::evaluation}).cross_entropy)
                        .item<double>();
        tokens += batch.valid_BL().sum().item<std::int64_t>();
      }
      expected /= static_cast<double>(tokens);
    });
    for (const std::string mesh : {"tp=1", "dp_shard=4", "dp_shard=2,cp=2"}) {
      const Config config = config_with(mesh, file.path(), more);
      const auto sets = open_validation(config);
      on_ranks(config, [&](models::Model& model, const Mesh& on, comm::Group&) {
        EXPECT_NEAR(validate_model(model, config, on, sets)->at(0).loss, expected, 1e-10 * expected)
            << mesh << ", " << packing;
      });
    }
  }
}

TEST(Validation, EndsWhereItIsToldTo) {
  const TemporaryFile text("held_out.txt", sentences());
  const Config config = config_with("tp=2,ep=2", text.path(), {"--validation.steps=30"});
  const auto sets = open_validation(config);
  on_ranks(config, [&](models::Model& model, const Mesh& mesh, comm::Group&) {
    int asked = 0;
    EXPECT_FALSE(validate_model(model, config, mesh, sets, [&] { return ++asked == 2; }));
    EXPECT_EQ(asked, 2);
  });
}

// A run that is told to stop saves, and does not validate first; without the stop it does.
TEST(Validation, ComesAfterAStop) {
  const TemporaryFile text("held_out.txt", sentences());
  const TemporaryFile place("nothing", "");
  const auto folder = std::filesystem::path(place.path()).parent_path();
  for (const bool stops : {false, true}) {
    const auto metrics = (folder / (stops ? "stopped" : "whole")).string();
    const auto summary =
        train(config_with("tp=1", text.path(),
                          {"--steps=2", "--validation.interval=1", "--metrics.folder=" + metrics,
                           stops ? "--training.max_minutes=1e-9" : "--training.max_minutes=0"}));
    EXPECT_EQ(summary.interrupted, stops);
    std::ifstream file(metrics + "/metrics.jsonl");
    const std::string lines{std::istreambuf_iterator<char>(file), {}};
    EXPECT_EQ(lines.find("held out") == std::string::npos, stops) << lines;
  }
}

TEST(Validation, IsDueAtItsIntervalAndAtTheEnd) {
  const TemporaryFile text("held_out.txt", sentences());
  const Config config = config_with("tp=1", text.path(), {"--steps=10"});
  for (std::int64_t step = 1; step <= 10; ++step)
    EXPECT_EQ(validation_is_due(config, step), step % 3 == 0 || step == 10) << step;
  EXPECT_FALSE(validation_is_due(config::load_config({}), 100));
}

}  // namespace
}  // namespace moesh::train
