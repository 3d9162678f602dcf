// A training step on one GPU: how often the host waits for the device, and that a CUDA graph of the
// step gives the bits that it gives without one.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <fstream>

#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "moesh/config/merge.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/train/build.h"
#include "tests/gpu/torch_cuda.h"

namespace moesh::train {
namespace {

using Args = std::vector<std::string>;

Args with(Args args, const Args& more) {
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

Config config_of(const std::string& model, const Args& more = {}) {
  Args args{"--model=" + model + ":tiny", "--dtype=bfloat16",    "--device=cuda",
            "--data.sequence_length=32",  "--data.batch_size=2", "--training.steps=200"};
  args.insert(args.end(), more.begin(), more.end());
  return config::load_config(args);
}

const Args kFloat8{"--training.float8=blockwise", "--training.float8_dense=blockwise",
                   "--model.dim=128", "--model.moe_ffn=128"};

// A run on one rank, step by step.
struct Trainer {
  const Config& config;
  const Mesh& mesh;
  std::unique_ptr<data::Dataset> dataset = open_dataset(config);
  std::unique_ptr<models::Model> model = make_model(config);
  std::unique_ptr<optim::Optimizer> optimizer = make_optimizer(*model, config);
  Stepper stepper{*model, *optimizer, step_options(config), use_graph(config)};
  std::int64_t step = 0;

  std::vector<models::MicroBatch> next_batches() const {
    return host_batches(config, *dataset, mesh)(step * sample_order(config).num_per_step());
  }
  StepResult take_step(bool counts_float8 = false) {
    auto batches = on_device(device(config), next_batches());
    const double lr = learning_rates(config)(step++);
    return stepper(std::move(batches), lr, counts_float8);
  }
  std::vector<at::Tensor> state() {
    std::vector<at::Tensor> all;
    model->each_param([&](Stored& w, bool) { all.push_back(w.value.detach().cpu()); });
    for (auto* router : model->routers()) all.push_back(router->expert_bias().cpu());
    for (const auto& s : optimizer->state()) all.push_back(s.value.cpu());
    return all;
  }
};

void alone(const Config& config, const std::function<void(const Mesh&)>& f) {
  comm::launch(
      1,
      [&](comm::Group& world) {
        const Mesh mesh(world, {});
        const MeshScope scope(mesh);
        f(mesh);
      },
      launch_options(config));
}

TEST(StepOnGpu, WaitsOnce) {
  for (const auto& name : models::model_names())
    for (const char* graph : {"off", "on"}) {
      const Config config = config_of(name, {std::string("--kernels.graph=") + graph});
      alone(config, [&](const Mesh& mesh) {
        Trainer run{config, mesh};
        for (int i = 0; i < Stepper::kEagerSteps + 2; ++i) run.take_step();
        EXPECT_EQ(gpu::count_waits([&] { run.take_step(); }), 1) << name << ", graph " << graph;
      });
    }
}

struct Case {
  std::string model;
  int num_steps;
  Args args;
  int num_graphs = 1;  // or more
};

// A file of short documents, of which sequences hold different numbers: some batches need a larger
// table of them than others, and so a graph of their own.
std::string documents() {
  const std::string path = testing::TempDir() + "step_gpu_documents.jsonl";
  std::ofstream file(path);
  for (int i = 0; i < 500; ++i)
    file << "{\"text\": \"" << std::string(static_cast<std::size_t>(1 + i * i % 23), 'a') << i
         << "\"}\n";
  return path;
}

// Steps of both, the same to the bit; then `look`.
void expect_same_bits(const Case& c, const Args& more, const Args& other,
                      const std::function<void(const Stepper&, const Stepper&)>& look) {
  const Config one = config_of(c.model, with(c.args, more)),
               another = config_of(c.model, with(c.args, other));
  alone(one, [&](const Mesh& mesh) {
    Trainer x{one, mesh}, y{another, mesh};
    for (int i = 0; i < c.num_steps; ++i) {
      const StepResult a = x.take_step(), b = y.take_step();
      ASSERT_EQ(a.gradients.loss, b.gradients.loss) << c.model << ", step " << i;
      ASSERT_EQ(a.update.grad_norm, b.update.grad_norm) << c.model << ", step " << i;
      for (size_t l = 0; l < a.gradients.counts_E.size(); ++l)
        ASSERT_TRUE(a.gradients.counts_E[l].equal(b.gradients.counts_E[l])) << c.model;
    }
    look(x.stepper, y.stepper);
    const auto states = x.state(), others = y.state();
    for (size_t i = 0; i < states.size(); ++i)
      ASSERT_TRUE(states[i].equal(others[i])) << c.model << ", tensor " << i;
  });
}

TEST(StepOnGpu, AGraphGivesTheSameBitsAsNone) {
  const Args masked{"--data.path=" + documents(), "--model.vocab_size=264"};
  const Case cases[] = {
      {"deepseek_v3", 20, masked, /*num_graphs=*/2},
      {"qwen3_moe", 20, masked, /*num_graphs=*/2},
      {"llama4", 20, masked, /*num_graphs=*/2},
      {"gpt_oss", 20, masked, /*num_graphs=*/2},
      {"deepseek_v3", 200, {"--training.gradient_accumulation_steps=2"}},
      {"deepseek_v3", 20, {"--activation_checkpoint.mode=full", "--kernels.weight_copies=true"}},
      {"deepseek_v3", 20, {"--activation_checkpoint.mode=selective"}},
      {"qwen3_moe", 20, {"--activation_checkpoint.mode=selective"}},
      {"mixtral", 20, {"--optimizer.name=sgd"}},
      {"qwen3_moe", 20, kFloat8},
      {"qwen3_moe", 20, with(kFloat8, {"--training.float8_rows=blockwise"})},
      {"deepseek_v3", 20,
       with(kFloat8, {"--kernels.weight_copies=true", "--training.gradient_accumulation_steps=2"})},
      {"llama4", 20, {}},
      {"gpt_oss", 20, {"--activation_checkpoint.mode=selective"}}};
  for (const Case& c : cases) {
    expect_same_bits(c, {"--kernels.graph=on"}, {"--kernels.graph=off"},
                     [&](const Stepper& graph, const Stepper& eager) {
                       EXPECT_EQ(graph.num_replayed(), c.num_steps - Stepper::kEagerSteps)
                           << c.model;
                       EXPECT_GE(graph.num_recorded(), c.num_graphs) << c.model;
                       EXPECT_EQ(eager.num_replayed(), 0);
                     });
  }
}

// By which a copy, or what was gathered early, is known to be old.
TEST(StepOnGpu, RaisesTheVersionsOfWhatItMoves) {
  for (const char* optimizer : {"adamw", "sgd", "muon"})
    for (const char* use : {"on", "off"}) {
      const Config config = config_of("qwen3_moe", {std::string("--kernels.graph=") + use,
                                                    std::string("--optimizer.name=") + optimizer});
      alone(config, [&](const Mesh& mesh) {
        Trainer run{config, mesh};
        for (int i = 0; i < Stepper::kEagerSteps + 2; ++i) {
          std::vector<std::int64_t> before;
          run.model->each_param([&](Stored& w, bool) { before.push_back(w.value._version()); });
          run.take_step();
          size_t p = 0;
          run.model->each_param([&](Stored& w, bool) {
            EXPECT_GT(w.value._version(), before[p++]) << optimizer << " " << use << " " << i;
          });
        }
      });
    }
}

// A graph reads the copies of weights: those of what somebody has written in place meanwhile.
TEST(StepOnGpu, AGraphSeesWhatIsWrittenBetweenSteps) {
  const Args copies{"--kernels.weight_copies=true"};
  for (const Args& more : {copies, with(kFloat8, copies)}) {
    const Config on = config_of("qwen3_moe", with(more, {"--kernels.graph=on"})),
                 off = config_of("qwen3_moe", with(more, {"--kernels.graph=off"}));
    alone(on, [&](const Mesh& mesh) {
      Trainer graph{on, mesh}, eager{off, mesh};
      for (int i = 0; i < Stepper::kEagerSteps + 4; ++i) {
        ASSERT_EQ(graph.take_step().gradients.loss, eager.take_step().gradients.loss) << i;
        const at::NoGradGuard no_grad;
        for (Trainer* t : {&graph, &eager})
          t->model->each_param([](Stored& w, bool) { w.value.mul_(0.5); });
      }
      EXPECT_EQ(graph.stepper.num_replayed(), 4);
    });
  }
}

// Codes that are kept are those that each product makes, also of what was written in place.
TEST(StepOnGpu, CodesOfFloat8AreNeverOld) {
  for (const char* model : {"qwen3_moe", "deepseek_v3", "gpt_oss"}) {
    const Config kept = config_of(model, with(kFloat8, {"--kernels.weight_copies=true"})),
                 anew = config_of(model, kFloat8);
    alone(kept, [&](const Mesh& mesh) {
      Trainer one{kept, mesh}, other{anew, mesh};
      int num_kept = 0;
      one.model->each_param([&](Stored& w, bool) { num_kept += w.float8 != nullptr; });
      EXPECT_GT(num_kept, 6) << model;
      for (int i = 0; i < Stepper::kEagerSteps + 4; ++i) {
        ASSERT_EQ(one.take_step().gradients.loss, other.take_step().gradients.loss)
            << model << ", step " << i;
        const at::NoGradGuard no_grad;
        if (i % 2 == 0)
          for (Trainer* t : {&one, &other})
            t->model->each_param([](Stored& w, bool) { w.value.mul_(1.25); });
      }
      const auto a = one.state(), b = other.state();
      for (size_t i = 0; i < a.size(); ++i) ASSERT_TRUE(a[i].equal(b[i])) << model << ", " << i;
    });
  }
}

// Steps that count are graphs of their own; the counts are those without a graph, and of codes that
// are made in every product.
TEST(StepOnGpu, CountsOfFloat8ChangeNothing) {
  for (const char* model : {"qwen3_moe", "deepseek_v3"}) {
    const Args keep{"--kernels.weight_copies=true", "--kernels.graph=on"};
    const Config graph = config_of(model, with(kFloat8, keep)),
                 eager = config_of(model, with(kFloat8, {"--kernels.graph=off"}));
    alone(graph, [&](const Mesh& mesh) {
      Trainer counted{graph, mesh}, plain{graph, mesh}, other{eager, mesh};
      for (int i = 0; i < Stepper::kEagerSteps + 5; ++i) {
        const bool counts = i % 2 == 1;
        const Gradients a = counted.take_step(counts).gradients,
                        b = other.take_step(counts).gradients;
        ASSERT_EQ(a.loss, plain.take_step().gradients.loss) << model << ", step " << i;
        ASSERT_EQ(a.loss, b.loss) << model << ", step " << i;
        ASSERT_EQ(a.float8_counts.defined(), counts);
        if (counts) {
          EXPECT_TRUE(a.float8_counts.equal(b.float8_counts)) << a.float8_counts - b.float8_counts;
        }
      }
      EXPECT_EQ(counted.stepper.num_recorded(), 2);
      const auto a = counted.state(), b = plain.state();
      for (size_t i = 0; i < a.size(); ++i) ASSERT_TRUE(a[i].equal(b[i])) << model << ", " << i;
    });
  }
}

// The graph reads tables which the model gives up when it has seen many lengths, and its memory is
// given back where something else needs it.
TEST(StepOnGpu, AGraphOutlivesItsTablesAndCanBeGivenBack) {
  const Config with = config_of("qwen3_moe", {"--kernels.graph=on"}),
               without = config_of("qwen3_moe", {"--kernels.graph=off"});
  alone(with, [&](const Mesh& mesh) {
    Trainer graph{with, mesh}, eager{without, mesh};
    const auto take_steps = [&](int num_steps) {
      for (int i = 0; i < num_steps; ++i)
        ASSERT_EQ(graph.take_step().gradients.loss, eager.take_step().gradients.loss) << i;
    };
    take_steps(Stepper::kEagerSteps + 2);
    EXPECT_EQ(graph.stepper.num_replayed(), 2);
    {
      const at::NoGradGuard no_grad;
      const auto batch = on_device(device(with), graph.next_batches())[0];
      for (std::int64_t length = 8; length < 24; ++length) {
        const models::MicroBatch other{.input_ids_BL = batch.input_ids_BL.narrow(1, 0, length),
                                       .labels_BL = batch.labels_BL.narrow(1, 0, length)};
        graph.model->forward(other, {.pass = nn::Pass::evaluation});
      }
    }
    // What was given up is written over.
    const at::Tensor rubbish =
        at::full({1 << 20}, 1e9, at::TensorOptions(at::kCUDA).dtype(at::kFloat));
    take_steps(3);
    EXPECT_EQ(graph.stepper.num_replayed(), 5);
    int num_tries = 0;
    const auto tries = [&] {
      TORCH_CHECK_WITH(OutOfMemoryError, ++num_tries > 1, "no memory beside the graph");
      return num_tries;
    };
    EXPECT_EQ(graph.stepper.beside(tries), 2);
    EXPECT_FALSE(graph.stepper.release()) << "nothing is left";
    take_steps(3);
    EXPECT_EQ(graph.stepper.num_replayed(), 7) << "recorded again after one step";
    num_tries = -1;
    EXPECT_THROW(eager.stepper.beside(tries), c10::OutOfMemoryError);
  });
}

// A graph skips what must not move, and says what is wrong with its data, as a step without one.
TEST(StepOnGpu, AGraphSkipsAndNamesWhatIsWrong) {
  const Config config = config_of("deepseek_v3", {"--kernels.graph=on"});
  alone(config, [&](const Mesh& mesh) {
    Trainer run{config, mesh};
    for (int i = 0; i < Stepper::kEagerSteps + 1; ++i) run.take_step();
    const auto before = run.state();
    auto batches = on_device(device(config), run.next_batches());
    batches[0].labels_BL.fill_(-100);
    EXPECT_TRUE(run.stepper(batches, 1e-3).update.skipped);
    batches[0].labels_BL.view(-1)[3] = 123456;
    std::string said;
    try {
      run.stepper(batches, 1e-3);
    } catch (const Error& e) {
      said = e.what();
    }
    EXPECT_NE(said.find("label 123456 is outside of the vocabulary"), std::string::npos) << said;
    const auto after = run.state();
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(before[i].equal(after[i])) << i;
    EXPECT_EQ(run.stepper.num_replayed(), 3);
  });
}

TEST(StepOnGpu, WhatCannotBeAGraphSaysWhy) {
  const Config config =
      config_of("deepseek_v3", {"--kernels.graph=on", "--kernels.gpu=library", "--dtype=float32"});
  alone(config, [&](const Mesh& mesh) {
    Trainer run{config, mesh};
    std::string said;
    try {
      for (int i = 0; i < Stepper::kEagerSteps + 1; ++i) run.take_step();
    } catch (const Error& e) {
      said = e.what();
    }
    const std::string before = "kernels.graph is on, but a step cannot be a CUDA graph: ";
    ASSERT_EQ(said.substr(0, before.size()), before);
    // What CUDA says of a wait or a read of the host.
    const std::string reason = said.substr(before.size());
    EXPECT_TRUE(reason.find("captur") != std::string::npos) << said;
  });
  const Config automatic = config_of("deepseek_v3", {"--kernels.gpu=library", "--dtype=float32"});
  alone(automatic, [&](const Mesh& mesh) {
    Trainer run{automatic, mesh};
    for (int i = 0; i < Stepper::kEagerSteps + 3; ++i) EXPECT_FALSE(run.take_step().update.skipped);
    EXPECT_EQ(run.stepper.num_replayed(), 0);
  });
}

}  // namespace
}  // namespace moesh::train
