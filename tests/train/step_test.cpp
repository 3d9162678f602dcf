// One optimizer step of a model: what makes all ranks skip it, and that nothing moves then.

#include "moesh/train/step.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <limits>

#include "moesh/base/random.h"
#include "moesh/comm/observers.h"
#include "moesh/config/merge.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/fsdp/reshard.h"
#include "moesh/models/registry.h"
#include "moesh/optim/rules.h"
#include "moesh/train/build.h"
#include "moesh/train/pipeline.h"
#include "tests/expect_error.h"
#include "tests/optim/take_step.h"
#include "tests/spmd/device.h"
#include "tests/spmd/layout_check.h"
#include "tests/support.h"
#include "tests/train/loss_check.h"
#include "tests/train/take_step.h"

namespace moesh::train {
namespace {

models::MicroBatch batch_of(const Mesh& mesh, std::int64_t label = -1) {
  const Random random(4, static_cast<std::uint64_t>(mesh.coordinate(dp)));
  at::Tensor ids = at::empty({2, 8}, at::kLong);
  for (std::int64_t i = 0; i < 16; ++i)
    ids.data_ptr<std::int64_t>()[i] = static_cast<std::int64_t>(random.below(i, 96));
  ids = ids.to(test_device());
  const at::Tensor labels =
      label == -1 ? ids.narrow(1, 1, 7) : at::full({2, 7}, label, ids.options());
  return {.input_ids_BL = ids.narrow(1, 0, 7).contiguous(), .labels_BL = labels.contiguous()};
}

// Everything that a step may move.
std::vector<at::Tensor> state_of(models::Model& model, optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  model.each_param([&](Stored& w, bool) { all.push_back(w.value.detach().clone()); });
  for (auto* router : model.routers()) all.push_back(router->expert_bias().clone());
  all.push_back(at::full({}, optimizer.num_steps(), at::kLong));
  return all;
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!a[i].equal(b[i])) return false;
  return a.size() == b.size();
}

// What a step needs, on each rank of a mesh.
struct Trainer {
  const Mesh& mesh;
  std::unique_ptr<models::Model> model =
      models::make_model(models::built_in("deepseek_v3", "tiny"),
                         {.dtype = at::kDouble, .device = test_device(), .seed = 1});
  std::unique_ptr<optim::Optimizer> optimizer = make_optimizer(*model, {});
  StepOptions options{.bias_coeff = 0.01};

  Gradients gradients(std::int64_t label = -1) {
    return accumulate_gradients(*model, {batch_of(mesh, label)}, options);
  }
  Update apply(const Gradients& g) { return apply_gradients(*model, *optimizer, g, 1e-3, options); }
  std::vector<at::Tensor> state() { return state_of(*model, *optimizer); }
};

TEST(OptionsOfTexts, ATextThatAnOptionDoesNotTakeIsNoDefaultOfIt) {
  Config schedule, recompute, balance, graph;
  schedule.lr_scheduler.kind = "sqrt";
  recompute.activation_checkpoint.mode = "half";
  balance.moe.balance_over = "run";
  graph.kernels.graph = "maybe";
  const auto config = ErrorKind::config;
  expect_parts(error_of([&] { learning_rates(schedule); }, config),
               {"lr_scheduler.kind is \"sqrt\"", "; it takes "});
  expect_parts(error_of([&] { step_options(recompute); }, config),
               {"activation_checkpoint.mode is \"half\"", "; it takes "});
  expect_parts(error_of([&] { step_options(balance); }, config),
               {"moe.balance_over is \"run\"", "; it takes "});
  expect_parts(error_of([&] { use_graph(graph); }, config),
               {"kernels.graph is \"maybe\"", "; it takes "});
}

// The guard of prefetched weights is their version, which kernels that write through pointers
// raise.
TEST(StepAndPrefetch, AnUpdateByAdamWMakesAPrefetchOld) {
  comm::launch(
      2,
      [](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 2});
        const MeshScope scope(mesh);
        for (const bool has_copy : {false, true}) {
          Param<Dense{Place::I, Place::I, Place::I}> w({.name = "w",
                                                        .shape = {64},
                                                        .dtype = at::kFloat,
                                                        .compute = at::kBFloat16,
                                                        .device = test_device()},
                                                       {.kind = Init::Distribution::ones});
          if (has_copy) raw::keep_copy(w.stored());
          optim::ParamList params;
          params.add(w);
          optim::Optimizer adamw(std::move(params),
                                 std::make_shared<optim::AdamW>(optim::AdamWConfig{}));
          const StepState step;
          prefetch({&w.stored()});
          w.stored().value.mutable_grad() = at::ones_like(w.stored().value.detach());
          optim::take_step(adamw, 0.5);
          const double first = local(use(w)).detach().to(at::kFloat)[0].item<double>();
          EXPECT_NEAR(first, 0.5, 0.06) << "not 1, which was prefetched";
        }
      },
      test_options());
}

class Steps : public testing::TestWithParam<MeshShape> {
 protected:
  template <class F>
  static void on_each_rank(const F& f) {
    comm::launch(
        GetParam().num_ranks(),
        [&](comm::Group& world) {
          const Mesh mesh(world, GetParam());
          const MeshScope scope(mesh);
          Trainer trainer{mesh};
          f(trainer, world);
        },
        test_options());
  }
};
INSTANTIATE_TEST_SUITE_P(Meshes, Steps,
                         testing::Values(MeshShape{}, MeshShape{.dp_shard = 2, .tp = 2, .ep = 2},
                                         MeshShape{.dp_replicate = 2, .cp = 2, .ep = 2},
                                         MeshShape{.tp = 4, .ep = 2, .etp = 2}),
                         [](const auto& info) { return "mesh" + std::to_string(info.index); });

// A single infinite number, only on the last rank.
TEST_P(Steps, AGradientThatIsNotFiniteStopsAllRanks) {
  on_each_rank([](Trainer& t, comm::Group& world) {
    ASSERT_FALSE(
        t.apply(t.gradients()).skipped);  // a step that counts, so that there is state to lose
    const auto before = t.state();

    const Gradients g = t.gradients();
    if (world.rank() == world.size() - 1) {
      at::Tensor some;
      t.model->each_param([&](Stored& w, bool) {
        if (w.spec.name.find("experts.w2") != std::string::npos && w.value.numel() > 0)
          some = w.value.grad();
      });
      ASSERT_TRUE(some.defined());
      some.view(-1)[0] = std::numeric_limits<double>::infinity();
    }
    EXPECT_TRUE(t.apply(g).skipped) << "rank " << world.rank();
    EXPECT_TRUE(same(before, t.state())) << "rank " << world.rank();

    // The next step is as if the bad one had not been: gradients and counts are gone.
    const Gradients again = t.gradients();
    EXPECT_EQ(again.loss, g.loss);
    EXPECT_FALSE(t.apply(again).skipped);
    EXPECT_FALSE(same(before, t.state()));
    for (const auto& tensor : t.state())
      EXPECT_TRUE(tensor.to(at::kDouble).isfinite().all().item<bool>());
  });
}

// The labels differ over dp and are the same on cp and tp: each counts once, as on one rank.
TEST_P(Steps, CountsTheValidTokensOfAllRanksOnce) {
  on_each_rank([](Trainer& t, comm::Group&) {
    auto batch = batch_of(t.mesh);
    const std::int64_t ignored = 1 + t.mesh.coordinate(dp);
    batch.labels_BL.narrow(1, 0, ignored).fill_(-100);
    std::int64_t expected = 0;
    for (std::int64_t d = 0; d < t.mesh.size(dp); ++d) expected += 2 * (7 - (1 + d));
    EXPECT_EQ(accumulate_gradients(*t.model, {batch}, t.options).num_tokens, expected);
    const at::Tensor mine = batch.labels_BL.ne(-100).sum(), all = at::full({}, expected, at::kLong);
    EXPECT_EQ(layout_complaint(t.mesh, assume<Dense{Place::P, Place::I, Place::I}>(mine), {}, all),
              "");
    EXPECT_EQ(
        layout_complaint(t.mesh, assume<Dense{Place::I, Place::I, Place::I}>(mine), {}, all) == "",
        t.mesh.size(dp) == 1)
        << "a layout that is not true is found";
  });
}

// What the model carries is what the kernels are chosen by in forward, and when it is computed
// again in backward; only on the thread of the rank, and no longer than that.
TEST_P(Steps, RunUnderTheKernelsOfTheirModel) {
  struct Watch : nn::Probe {
    std::vector<kernels::GpuKernels> seen;
    at::Tensor on_choice(const nn::Choice& choice) override {
      if (!choice.for_balance) seen.push_back(kernels::gpu_kernels());
      return choice.experts_NK;
    }
  };
  on_each_rank([](Trainer& t, comm::Group&) {
    using enum kernels::GpuKernels;
    const auto asked = t.mesh.coordinate(tp) == 0 ? library : automatic;
    t.model = models::make_model(
        models::built_in("deepseek_v3", "tiny"),
        {.dtype = at::kDouble, .device = test_device(), .seed = 1, .gpu_kernels = asked});
    Watch watch;
    t.options.forward.probe = &watch;
    t.options.forward.recompute = models::Recompute::full;
    t.gradients();
    const size_t num_layers = t.model->routers().size();
    EXPECT_EQ(watch.seen, std::vector<kernels::GpuKernels>(2 * num_layers, asked));
    EXPECT_EQ(kernels::gpu_kernels(), automatic);
  });
}

// On one rank of the last dp rank's: all skip the step, and it is named where it was found.
TEST_P(Steps, AWrongLabelIsNamedAndNothingMovesOnAnyRank) {
  on_each_rank([](Trainer& t, comm::Group& world) {
    const auto before = t.state();
    auto batch = batch_of(t.mesh);
    const bool is_here = world.rank() == world.size() - 1;
    if (is_here) batch.labels_BL.fill_(4096);
    t.optimizer->begin_step(1e-3);
    UnreadStep step = start_gradients(*t.model, {batch}, t.options);
    start_update(*t.model, *t.optimizer, step, t.options);
    EXPECT_TRUE(same(before, t.state())) << "rank " << world.rank();
    std::string said;
    try {
      EXPECT_TRUE(read(step).update.skipped) << "rank " << world.rank();
    } catch (const Error& e) {
      said = e.what();
    }
    EXPECT_EQ(said.find("label 4096 is outside of the vocabulary of ") != std::string::npos,
              is_here)
        << said;
  });
}

TEST_P(Steps, AWrongTokenIsNamed) {
  on_each_rank([](Trainer& t, comm::Group&) {
    auto batch = batch_of(t.mesh);
    batch.input_ids_BL.view(-1).fill_(-7);
    EXPECT_EQ(error_of([&] { accumulate_gradients(*t.model, {batch}, t.options); }, ErrorKind::data)
                  .substr(0, 44),
              "token -7 is outside of the vocabulary of 96;");
  });
}

// With one wait at its end a step has the bits of the one whose parts are read in between.
TEST_P(Steps, AWholeStepIsItsParts) {
  on_each_rank([](Trainer& t, comm::Group&) {
    Trainer other{t.mesh};
    for (int step = 0; step < 3; ++step) {
      const Gradients g = t.gradients();
      const Update u = t.apply(g);
      const StepResult r =
          take_step(*other.model, *other.optimizer, {batch_of(t.mesh)}, 1e-3, other.options);
      EXPECT_EQ(r.gradients.loss, g.loss);
      EXPECT_EQ(r.gradients.num_tokens, g.num_tokens);
      EXPECT_EQ(r.update.grad_norm, u.grad_norm);
      EXPECT_FALSE(r.update.skipped);
    }
    EXPECT_TRUE(same(t.state(), other.state()));
  });
}

TEST_P(Steps, WithoutAValidTokenNothingMoves) {
  on_each_rank([](Trainer& t, comm::Group&) {
    const auto before = t.state();
    const Gradients g = t.gradients(-100);
    EXPECT_EQ(g.loss, 0);
    EXPECT_EQ(g.num_tokens, 0);
    EXPECT_TRUE(t.apply(g).skipped);
    EXPECT_TRUE(same(before, t.state()));
  });
}

// Three steps in bfloat16, with a change of the weights by somebody else before the last.
std::vector<at::Tensor> trained(const Mesh& mesh, bool weight_copies, bool reshard) {
  Trainer t{mesh};
  t.model = models::make_model(
      models::built_in("deepseek_v3", "tiny"),
      {.dtype = at::kBFloat16, .device = test_device(), .seed = 1, .weight_copies = weight_copies});
  t.optimizer = make_optimizer(*t.model, {});
  t.options.forward.reshard = reshard;
  t.options.qk_clip = 0.02, t.options.forward.watches_logits = true;
  for (int step = 0; step < 3; ++step) {
    const Gradients g = t.gradients();
    t.apply(g);
    const at::NoGradGuard no_grad;
    if (step == 1) t.model->each_param([](Stored& w, bool) { w.value.mul_(1.5); });
  }
  return t.state();
}

// Copies are those of the weights as they are, and a cast that is made again is the same cast.
TEST_P(Steps, CopiesAndFreedCastsChangeNoBit) {
  on_each_rank([](Trainer& t, comm::Group&) {
    const auto plain = trained(t.mesh, false, false);
    EXPECT_TRUE(same(plain, trained(t.mesh, true, false)));
    EXPECT_TRUE(same(plain, trained(t.mesh, false, true)));
    EXPECT_TRUE(same(plain, trained(t.mesh, true, true)));
  });
}

TEST(OneStep, TellsCountsAndBiasOfEachLayer) {
  const OneRankScope scope;
  Trainer t{current_mesh()};
  const auto routers = t.model->routers();
  ASSERT_GT(routers.size(), 1u);
  for (size_t i = 0; i < routers.size(); ++i) {
    at::Tensor& bias = routers[i]->expert_bias();
    bias.copy_(at::arange(bias.numel(), bias.options()) * 0.01 + static_cast<double>(i));
  }
  t.options.bias_coeff = 0;  // they stay
  const Gradients one = t.gradients(),
                  two = accumulate_gradients(*t.model, {batch_of(t.mesh), batch_of(t.mesh)},
                                             t.options);
  ASSERT_EQ(one.counts_E.size(), routers.size());
  const Update update = t.apply(two);
  ASSERT_EQ(update.bias.size(), routers.size());
  for (size_t i = 0; i < routers.size(); ++i) {
    const std::int64_t num_choices = 2 * 7 * 2;  // tokens, each with two experts
    EXPECT_EQ(one.counts_E[i].sum().item<std::int64_t>(), num_choices) << i;
    EXPECT_TRUE(two.counts_E[i].equal(2 * one.counts_E[i])) << i;
    EXPECT_EQ(update.bias[i].least, routers[i]->expert_bias().min().item<double>()) << i;
    EXPECT_EQ(update.bias[i].largest, routers[i]->expert_bias().max().item<double>()) << i;
  }
}

TEST(OneStep, OfOneTokenMovesTheModel) {
  const OneRankScope scope;
  Trainer t{current_mesh()};
  auto batch = batch_of(t.mesh);
  batch.labels_BL.slice(1, 1).fill_(-100);
  batch.labels_BL.select(0, 1).fill_(-100);
  const auto before = t.state();
  const Gradients g = accumulate_gradients(*t.model, {batch}, t.options);
  EXPECT_EQ(g.num_tokens, 1);
  EXPECT_FALSE(t.apply(g).skipped);
  const auto after = t.state();
  EXPECT_FALSE(after[0].equal(before[0]));
}

TEST(Losses, OfOneMoeLayerAreTold) {
  const OneRankScope scope;
  auto config = models::built_in<models::MixtralConfig>("tiny");
  config.num_layers = 1;
  const auto model = models::make_model(config, {.dtype = at::kDouble, .device = test_device()});
  const auto with = [&](double balance, double z) {
    StepOptions options;
    options.forward.auxiliary = {.balance_weight = balance, .z_weight = z};
    return accumulate_gradients(*model, {batch_of(current_mesh())}, options);
  };
  const Gradients g = with(0.1, 0.2), whole = with(1, 1);
  EXPECT_GT(g.auxiliary[0], 0);
  EXPECT_GT(g.auxiliary[1], 0);
  EXPECT_NEAR(g.total_loss, g.loss + g.auxiliary[0] + g.auxiliary[1], 1e-12);
  EXPECT_NEAR(whole.auxiliary[0], 10 * g.auxiliary[0], 1e-12);
  EXPECT_NEAR(whole.auxiliary[1], 5 * g.auxiliary[1], 1e-12);
}

TEST(Lanes, HaveWhatTheThreadOfTheRankHas) {
  std::vector<int> lanes;  // they take turns
  comm::launch(1, [&](comm::Group& world) {
    const Mesh mesh(world, {});
    const MeshScope scope(mesh);
    StepState state;
    const auto recorder = comm::flight::current();
    EXPECT_TRUE(recorder);
    in_lanes(state, at::kCPU, [&](int lane, StepState& own) {
      lanes.push_back(lane);
      EXPECT_EQ(comm::flight::current(), recorder);
      EXPECT_EQ(&own == &state, lane == 0);
      EXPECT_EQ(&current_mesh(), &mesh);
    });
  });
  EXPECT_EQ(lanes, (std::vector{0, 1}));
}

TEST(QkClip, RefusesWhatItCannotScale) {
  const OneRankScope scope;
  const auto refused = [](std::vector<std::string> args, const std::string& reason) {
    args.push_back("--optimizer.qk_clip=100");
    const Config config = config::load_config(args);
    const auto model = make_model(config);
    expect_error([&] { make_optimizer(*model, config); }, reason);
  };
  refused({"--model=qwen3_moe:tiny"},
          "optimizer.qk_clip is 100.0 (command line), and qwen3_moe normalises queries and keys");
  refused({"--model=olmoe:tiny"}, "set optimizer.qk_clip to 0");
  refused({"--training.freeze=*.kv_b_proj.weight"},
          "model.layers.0.self_attn.kv_b_proj.weight, which it would scale, is frozen");
  refused({"--lora.rank=2"}, "q_b_proj.weight, which it would scale, is frozen");
}

// Against formulas that no rank computes with: one rank and a mesh may make the same mistake.
TEST(Losses, EveryTermIsItsFormulaOverTheTokensWithALabel) {
  for (const auto& shape : {MeshShape{}, MeshShape{.dp_shard = 2, .ep = 2}, MeshShape{.cp = 4},
                            MeshShape{.tp = 4}, MeshShape{.cp = 2, .tp = 2, .ep = 2, .etp = 2}})
    for (const auto mask : losses::kMasks)
      for (bool sequence_parallel : {true, false}) {
        if (!sequence_parallel && shape.tp == 1) continue;
        EXPECT_EQ(losses::step_complaint(shape, mask, sequence_parallel), "")
            << shape.describe() << (sequence_parallel ? "" : ", no sequence parallelism");
      }
}

}  // namespace
}  // namespace moesh::train
