// When a step is a graph, how many there are, what they share, and what happens without memory.

#include "moesh/train/step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "moesh/base/random.h"
#include "moesh/config/merge.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/train/build.h"
#include "tests/expect_error.h"
#include "tests/train/graphs_on_cpu.h"

namespace moesh::train {
namespace {

Config config_of(const std::vector<std::string>& more = {}) {
  std::vector<std::string> args{"--model=qwen3_moe:tiny", "--dtype=float32",
                                "--data.sequence_length=8", "--data.batch_size=1"};
  args.insert(args.end(), more.begin(), more.end());
  return config::load_config(args);
}

// Throws as an allocator would, when it is told to.
struct Forgetful : nn::Probe {
  int num_left = 0;  // forwards that find no memory
  void on_input(const at::Tensor&) override {
    TORCH_CHECK_WITH(OutOfMemoryError, num_left-- <= 0, "no memory for a forward");
  }
};

struct Trainer {
  explicit Trainer(const Config& c, UseGraph use)
      : config(c), stepper(*model, *optimizer, options(), use, cpu.graphs()) {
    cpu.model = model.get();
  }
  StepOptions options() {
    StepOptions o = step_options(config);
    o.forward.probe = &probe;
    o.probe_waits = false;
    return o;
  }
  StepResult take_step(std::int64_t most_documents = 0) {
    auto batches = step_batches(config, *dataset, current_mesh(), step);
    for (auto& b : batches)
      if (most_documents > 0) b.documents = {at::zeros_like(b.input_ids_BL), most_documents};
    return stepper(std::move(batches), learning_rates(config)(step++));
  }
  std::vector<at::Tensor> state() {
    std::vector<at::Tensor> all;
    model->each_param([&](Stored& w, bool) { all.push_back(w.value.detach().clone()); });
    for (auto* router : model->routers()) all.push_back(router->expert_bias().clone());
    for (const auto& s : optimizer->state()) all.push_back(s.value.clone());
    return all;
  }

  Config config;
  GraphsOnCpu cpu;
  Forgetful probe;
  std::unique_ptr<data::Dataset> dataset = open_dataset(config);
  std::unique_ptr<models::Model> model = make_model(config);
  std::unique_ptr<optim::Optimizer> optimizer = make_optimizer(*model, config);
  Stepper stepper;
  std::int64_t step = 0;
};

void expect_same(Trainer& a, Trainer& b) {
  const auto one = a.state(), other = b.state();
  ASSERT_EQ(one.size(), other.size());
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(one[i].equal(other[i])) << i;
}

class Graphs : public testing::Test {
 protected:
  std::shared_ptr<comm::Group> world = comm::solo_group();
  Mesh mesh{*world, {}};
  MeshScope scope{mesh};
};

TEST_F(Graphs, AReplayWritesNewerValuesAndCopies) {
  const Config config = config_of({"--dtype=bfloat16", "--kernels.weight_copies=true"});
  Trainer graph(config, UseGraph::automatic), eager(config, UseGraph::off);
  const auto versions = [](Trainer& t) {
    std::vector<std::int64_t> all;
    t.model->each_param([&](Stored& w, bool) { all.push_back(w.value._version()); });
    for (const auto& s : t.optimizer->state()) all.push_back(s.value._version());
    return all;
  };
  for (int i = 0; i < Stepper::kEagerSteps + 3; ++i) {
    const auto before = versions(graph);
    EXPECT_EQ(graph.take_step().gradients.loss, eager.take_step().gradients.loss) << i;
    const auto after = versions(graph);
    for (size_t p = 0; p < before.size(); ++p) EXPECT_GT(after[p], before[p]) << i << " " << p;
    graph.model->each_param([&](Stored& w, bool) {
      if (!w.copy) return;
      EXPECT_EQ(w.copy->version, static_cast<std::int64_t>(w.value._version())) << w.spec.name;
      EXPECT_TRUE(w.copy->value.equal(w.value.detach().to(at::kBFloat16))) << w.spec.name;
    });
  }
  EXPECT_EQ(graph.stepper.num_replayed(), 3);
  expect_same(graph, eager);
}

// Somebody has written the weights, and the step that would have renewed the copies was never run.
TEST_F(Graphs, ACaptureThatFailsLeavesNoCopyThatLooksNew) {
  const Config config = config_of({"--dtype=bfloat16", "--kernels.weight_copies=true"});
  Trainer graph(config, UseGraph::automatic), eager(config, UseGraph::off);
  for (int i = 0; i < Stepper::kEagerSteps; ++i) graph.take_step(), eager.take_step();
  for (Trainer* t : {&graph, &eager})
    t->model->each_param([](Stored& w, bool) { w.value.detach().mul_(2); });
  graph.cpu.fails_late = true;
  EXPECT_EQ(graph.take_step().gradients.loss, eager.take_step().gradients.loss);
  expect_same(graph, eager);
}

TEST_F(Graphs, EachBoundOnDocumentsIsOneAndAllHaveOneMemory) {
  const Config config = config_of();
  Trainer graph(config, UseGraph::automatic), eager(config, UseGraph::off);
  const auto both = [&](std::int64_t most) {
    EXPECT_EQ(graph.take_step(most).gradients.loss, eager.take_step(most).gradients.loss);
  };
  for (int i = 0; i < Stepper::kEagerSteps; ++i) both(1);
  EXPECT_EQ(graph.stepper.num_recorded(), 0);
  for (const std::int64_t most : {1, 2, 1, 4, 2, 4}) both(most);
  EXPECT_EQ(graph.stepper.num_recorded(), 3) << "no step without a graph between them";
  EXPECT_EQ(graph.stepper.num_replayed(), 6);
  EXPECT_EQ(graph.cpu.beside_others, (std::vector<bool>{false, true, true}));
  expect_same(graph, eager);
}

TEST_F(Graphs, AreFewAndTheOneOfLongAgoGoes) {
  Trainer graph(config_of(), UseGraph::automatic);
  for (int i = 0; i < Stepper::kEagerSteps; ++i) graph.take_step(1);
  const auto most = static_cast<std::int64_t>(Stepper::kMostGraphs);
  for (std::int64_t bound = 1; bound <= most; ++bound) graph.take_step(bound);
  graph.take_step(1);
  EXPECT_EQ(graph.stepper.num_recorded(), most);
  graph.take_step(most + 1);  // instead of 2
  EXPECT_EQ(graph.stepper.num_recorded(), most + 1);
  for (std::int64_t bound : {std::int64_t{1}, std::int64_t{3}, most}) graph.take_step(bound);
  EXPECT_EQ(graph.stepper.num_recorded(), most + 1);
  graph.take_step(2);
  EXPECT_EQ(graph.stepper.num_recorded(), most + 2);
  EXPECT_EQ(graph.cpu.largest_alive, static_cast<int>(most));
}

TEST_F(Graphs, WithoutMemoryForOneMoreAStepRunsWithoutAndTheyBeginAgain) {
  const Config config = config_of();
  Trainer graph(config, UseGraph::automatic), eager(config, UseGraph::off);
  const auto both = [&](std::int64_t most) {
    EXPECT_EQ(graph.take_step(most).gradients.loss, eager.take_step(most).gradients.loss);
  };
  graph.cpu.most_alive = 1;
  for (int i = 0; i < Stepper::kEagerSteps + 2; ++i) both(1);
  EXPECT_EQ(graph.stepper.num_replayed(), 2);
  both(2);
  EXPECT_EQ(graph.cpu.num_alive, 0) << "the first one is given back";
  both(2);  // to make what was let go
  both(2);
  EXPECT_EQ(graph.stepper.num_replayed(), 3);
  for (int i = 0; i < 5; ++i) both(1);
  EXPECT_EQ(graph.stepper.num_replayed(), 3) << "the second time is the last";
  EXPECT_EQ(graph.cpu.num_alive, 0);
  expect_same(graph, eager);

  Trainer asked(config, UseGraph::on);
  asked.cpu.most_alive = 0;
  for (int i = 0; i < Stepper::kEagerSteps + 1; ++i) asked.take_step(1);
  asked.take_step(1);
  expect_error([&] { asked.take_step(1); }, "no memory for a graph");
}

// A step of other sizes, beside graphs: it begins again when they are gone, from nothing.
TEST_F(Graphs, AStepThatFindsNoMemoryBesideThemBeginsAgain) {
  const Config config = config_of({"--training.gradient_accumulation_steps=2"});
  Trainer graph(config, UseGraph::automatic), eager(config, UseGraph::off);
  const auto other = [](Trainer& t) {
    auto batches = step_batches(t.config, *t.dataset, current_mesh(), 0);
    for (auto& b : batches)
      for (at::Tensor* x : b.from_data()) *x = x->narrow(1, 0, 5).contiguous();
    return t.stepper(std::move(batches), 1e-3);
  };
  for (int i = 0; i < Stepper::kEagerSteps + 1; ++i) graph.take_step(), eager.take_step();
  EXPECT_EQ(graph.cpu.num_alive, 1);
  graph.probe.num_left = 1;
  const StepResult a = other(graph), b = other(eager);
  EXPECT_EQ(a.gradients.loss, b.gradients.loss);
  EXPECT_EQ(a.update.grad_norm, b.update.grad_norm);
  for (size_t l = 0; l < a.gradients.counts_E.size(); ++l)
    EXPECT_TRUE(a.gradients.counts_E[l].equal(b.gradients.counts_E[l]));
  EXPECT_EQ(graph.cpu.num_alive, 0);
  expect_same(graph, eager);
  graph.probe.num_left = 1;
  EXPECT_THROW(other(graph), c10::OutOfMemoryError) << "nothing is left to give back";
}

// 2,000 steps of 8 micro-batches of 8 sequences, documents of 250 tokens in the mean.
TEST(GraphsOfDocuments, AreFew) {
  const Random random(7, std::string_view("documents"));
  constexpr std::int64_t kSequences = 8, kLength = 2048, kMicro = 8;
  std::uint64_t drawn = 0;
  std::set<std::int64_t> bounds;
  LruCache<std::int64_t, bool> recorded(Stepper::kMostGraphs);
  int num_replayed = 0;
  for (int step = 0; step < 2000; ++step) {
    std::int64_t most = 0;
    for (std::int64_t micro = 0; micro < kMicro; ++micro) {
      std::int64_t num = 0;
      for (std::int64_t s = 0; s < kSequences; ++s)
        for (double at = 0; at < kLength; ++num) at += -250 * std::log(random.uniform(drawn++));
      most = std::max(most, num);
    }
    most = most_documents(kSequences, kLength, most);
    bounds.insert(most);
    if (step >= Stepper::kEagerSteps) recorded[most] = true, ++num_replayed;
  }
  EXPECT_LE(bounds.size(), 3u);
  EXPECT_EQ(num_replayed, 1997);
}

}  // namespace
}  // namespace moesh::train
