// Steps through a pipeline: what stages do together, and what is said of one that fails.

#include "moesh/train/pipeline.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "moesh/comm/rank_status.h"
#include "moesh/config/merge.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/train/build.h"
#include "moesh/train/loop.h"
#include "tests/counting_allocator.h"
#include "tests/support.h"
#include "tests/train/device.h"
#include "tests/train/take_step.h"

namespace moesh::train {
namespace {

[[maybe_unused]] const bool is_counting = (CountingAllocator::install(), true);

Config config_on(const std::string& mesh, const std::vector<std::string>& more = {}) {
  std::vector<std::string> args{"--mesh", mesh, "--data.sequence_length=7",
                                "--metrics.folder=", "--metrics.quiet"};
  args.insert(args.end(), more.begin(), more.end());
  return config::load_config(args, test_settings());
}

std::vector<double> losses(const std::string& mesh, const std::vector<std::string>& more) {
  return train(config_on(mesh, more)).losses;
}

// Two sequences of each of two dp ranks, in three micro-batches.
TEST(Pipelines, LearnWhatOneRankLearns) {
  const std::vector<std::string> run{"--steps=12",           "--training.global_batch_size=12",
                                     "--data.batch_size=2",  "--optimizer.lr=5e-3",
                                     "--model.num_layers=4", "--model.tie_embeddings=true"};
  const auto one = losses("tp=1", run);
  EXPECT_LT(one.back(), one.front() - 0.1);
  for (const auto& [mesh, schedule] : std::vector<std::pair<std::string, std::string>>{
           {"pp=2,tp=2", "zbv"}, {"pp=4", "zero_bubble"}, {"pp=2,dp_shard=2,ep=2", "1f1b"}}) {
    auto more = run;
    more.push_back("--parallelism.pipeline_parallel_schedule=" + schedule);
    const auto there = losses(mesh, more);
    ASSERT_EQ(there.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i)
      EXPECT_NEAR(there[i], one[i], 1e-9) << mesh << ", step " << i + 1;
  }
}

// A probe that does something in the MoE layer `layer`, for one micro-batch, on one rank of pp.
class AtChoice : public nn::Probe {
 public:
  AtChoice(std::int64_t layer, std::int64_t micro_batch, std::function<void()> f)
      : layer_(layer), micro_batch_(micro_batch), f_(std::move(f)) {}
  at::Tensor on_choice(const nn::Choice& c) override {
    if (c.layer == layer_ && c.micro_batch == micro_batch_ && !c.for_balance) f_();
    return c.experts_NK;
  }

 private:
  std::int64_t layer_, micro_batch_;
  std::function<void()> f_;
};

// What each rank says of a step in which `f` is called in stage 1 for micro-batch 1.
std::vector<std::string> faults_of(const std::function<void()>& f, std::chrono::milliseconds wait) {
  const Config config = config_on("pp=3", {"--training.gradient_accumulation_steps=4"});
  std::vector<std::string> texts(3);
  std::mutex mutex;
  comm::LaunchOptions options = test_options();
  options.timeout = wait;
  options.after_fault = [&](int rank, const std::exception_ptr& fault) {
    const std::lock_guard lock(mutex);
    texts[static_cast<size_t>(rank)] = comm::text_of(fault);
  };
  EXPECT_THROW(comm::launch(
                   3,
                   [&](comm::Group& world) {
                     const Mesh mesh(world, mesh_shape(config));
                     const MeshScope scope(mesh);
                     const auto model = make_model(config);
                     const auto data = open_dataset(config);
                     AtChoice probe(0, 1, f);
                     StepOptions step = step_options(config);
                     step.forward.probe = &probe;
                     accumulate_gradients(*model, step_batches(config, *data, mesh, 0), step);
                   },
                   options),
               Error);
  return texts;
}

TEST(Pipelines, ARankThatFailsIsNamedWithItsActionByAll) {
  const auto texts = faults_of([] { throw Error(ErrorKind::internal, "a rank is gone"); },
                               std::chrono::seconds(60));
  EXPECT_EQ(texts[1], "rank 1 of pp, forward of stage 1 for micro-batch 1: a rank is gone");
  // The others name what they were at, and why it failed.
  for (const size_t r : {0u, 2u})
    expect_parts(texts[r], {detail::concat("rank ", r, " of pp, "), detail::concat(" of stage ", r),
                            " for micro-batch ",
                            "rank 1 failed: rank 1 of pp, forward of stage 1 for micro-batch 1"});
}

TEST(Pipelines, ARankThatIsStuckIsNamedAtTheDeadline) {
  const auto texts = faults_of([] { std::this_thread::sleep_for(std::chrono::seconds(3)); },
                               std::chrono::milliseconds(1000));
  expect_parts(texts[2], {"rank 2 of pp, forward of stage 2 for micro-batch 1: ", "rank 1"});
}

using Gradients = std::map<std::string, at::Tensor>;  // by parameter

Gradients gradients_of(models::Model& model) {
  Gradients all;
  model.each_param([&](Stored& w, bool) { all[w.spec.name] = w.value.grad(); });
  return all;
}

// The forwards and backwards of a step on two ranks, and what `look` sees of each forward. The
// gradients of all ranks; `change` may do something to the schedule.
Gradients run_step(const Config& config, bool has_backward, const OnForward& look,
                   const std::function<void(pipeline::Schedule&)>& change = {}) {
  Gradients all;
  std::mutex mutex;
  comm::launch(
      2,
      [&](comm::Group& world) {
        const Mesh mesh(world, mesh_shape(config));
        const MeshScope scope(mesh);
        const auto model = make_model(config);
        const auto batches = step_batches(config, *open_dataset(config), mesh, 0);
        const StepOptions step = step_options(config);
        auto list = schedule_of(step.pipeline, batches.size());
        if (!has_backward) list = forwards_of(list);
        if (change) change(list);
        const at::AutoGradMode grad(has_backward);
        StepState state(true);
        run_pipeline(*model, batches, step.forward, list, has_backward ? &state : nullptr, look);
        state.finish_sums();
        const std::lock_guard lock(mutex);
        all.merge(gradients_of(*model));
      },
      test_options());
  return all;
}

void expect_same(const Gradients& a, const Gradients& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, gradient] : a) {
    const at::Tensor& other = b.at(name);
    EXPECT_TRUE(at::allclose(gradient, other, 1e-10, 1e-14)) << name;
    EXPECT_GT(gradient.abs().sum().item<double>(), 0) << name;
  }
}

// The most activations of stage 0 that were in memory at once, besides the one that it has just
// made, while stage 1 takes its time for each.
int most_alive(const std::string& schedule, bool has_backward) {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> made;
  int most = 0;
  const auto look = [&](const pipeline::Action& a, const models::ForwardResult& result) {
    if (a.stage > 0) return std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const auto alive =
        std::count_if(made.begin(), made.end(), [](const auto& x) { return !x.expired(); });
    most = std::max(most, static_cast<int>(alive));
    const auto keep = [&](const auto& x) {
      made.push_back(local(x).storage().getWeakStorageImpl());
    };
    std::visit(keep, result.stream);
  };
  run_step(config_on("pp=2", {"--training.gradient_accumulation_steps=7",
                              "--parallelism.pipeline_parallel_schedule=" + schedule}),
           has_backward, look);
  EXPECT_EQ(made.size(), 7u);
  return most;
}

// One is under way.
TEST(Pipelines, ValidationHoldsFewActivations) {
  EXPECT_LE(most_alive("1f1b", false), 1);
  EXPECT_LE(most_alive("gpipe", false), 1);
}

// What was sent is freed then, and not when its gradient comes.
TEST(Pipelines, WhatWasSentIsFreed) {
  EXPECT_LE(most_alive("gpipe", true), 1);
  EXPECT_LE(most_alive("zero_bubble", true), 1);
}

// The last stage has one gradient of the head at a time, however many forwards it runs ahead.
TEST(Pipelines, GradientsOfTheHeadAreNotKept) {
  const std::int64_t vocab = 20'000;
  const Config config = config_on("pp=2", {"--training.gradient_accumulation_steps=6",
                                           "--model.vocab_size=" + std::to_string(vocab),
                                           "--parallelism.pipeline_parallel_schedule=gpipe"});
  std::vector<std::int64_t> live(6);
  run_step(config, true, [&](const pipeline::Action& a, const models::ForwardResult&) {
    if (a.stage == 1) live[static_cast<size_t>(a.micro_batch)] = CountingAllocator::live;
  });
  const std::int64_t head = vocab * 32 * 8;
  EXPECT_GT(live[2], 2 * head) << "the head, and its gradient";
  EXPECT_LT(live[5] - live[2], head);
}

Config halves_config() {
  return config_on("pp=2", {"--training.gradient_accumulation_steps=3",
                            "--parallelism.pipeline_parallel_schedule=zero_bubble"});
}

void look_at_nothing(const pipeline::Action&, const models::ForwardResult&) {}

// A list of the user's own: the second micro-batch has its backward whole.
TEST(Pipelines, MayMixWholeBackwardsWithHalves) {
  const auto mix = [](pipeline::Schedule& s) {
    for (auto& list : s.ranks) {
      std::erase_if(list, [](const pipeline::Action& a) {
        return a.kind == pipeline::ActionKind::backward_weight && a.micro_batch == 1;
      });
      for (auto& a : list)
        if (a.kind == pipeline::ActionKind::backward_input && a.micro_batch == 1)
          a.kind = pipeline::ActionKind::backward;
    }
    check(s);
  };
  expect_same(run_step(halves_config(), true, look_at_nothing),
              run_step(halves_config(), true, look_at_nothing, mix));
}

// One stage, and the loss in one piece: cross-entropy and auxiliary losses, by autograd only.
TEST(Pipelines, HaveTheGradientsOfTheWholeLoss) {
  const Config config = config_on(
      "tp=1",
      {"--training.gradient_accumulation_steps=2", "--parallelism.pipeline_parallel_schedule=gpipe",
       "--moe.balance_loss_weight=0.3", "--moe.z_loss_weight=0.05", "--model.num_mtp_layers=2"});
  const auto world = comm::solo_group();
  const Mesh mesh(*world, mesh_shape(config));
  const MeshScope scope(mesh);
  const StepOptions step = step_options(config);
  auto batches = step_batches(config, *open_dataset(config), mesh, 0);
  const auto of_step = make_model(config), by_hand = make_model(config);
  accumulate_gradients(*of_step, batches, step);
  for (auto& batch : batches) {
    batch.num_step_tokens = at::full({}, 2 * batch.labels_BL.numel(), at::kDouble);
    backward(by_hand->forward(batch, step.forward).loss);
  }
  expect_same(gradients_of(*by_hand), gradients_of(*of_step));
}

// However a schedule is called: one rank has nothing to wait for, and holds one micro-batch.
TEST(Pipelines, OfOneRankTakeMicroBatchesOneByOne) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  for (const auto& name : pipeline::schedule_names())
    EXPECT_EQ(schedule_of({.schedule = name, .stages_of_a_rank = 2}, 3).ranks,
              pipeline::one_f_one_b(1, 3).ranks);
}

// The weight that both ends have counts once.
TEST(Pipelines, HaveTheNormOfOneRank) {
  std::vector<double> norms;
  for (const std::string mesh_text : {"tp=1", "pp=3"}) {
    const Config config = config_on(
        mesh_text, {"--model.tie_embeddings=true", "--training.gradient_accumulation_steps=2"});
    std::mutex mutex;
    comm::launch(
        mesh_shape(config).num_ranks(),
        [&](comm::Group& world) {
          const Mesh mesh(world, mesh_shape(config));
          const MeshScope scope(mesh);
          const auto model = make_model(config);
          const auto optimizer = make_optimizer(*model, config);
          const auto batches = step_batches(config, *open_dataset(config), mesh, 0);
          const auto r = take_step(*model, *optimizer, batches, 1e-2, step_options(config));
          const std::lock_guard lock(mutex);
          norms.push_back(r.update.grad_norm);
        },
        test_options());
  }
  ASSERT_EQ(norms.size(), 4u);
  for (const double norm : norms) EXPECT_NEAR(norm, norms[0], 1e-12 * norms[0]);
}

// The copies of a tied embedding at both ends take the same update.
TEST(Pipelines, BothEndsOfATiedModelStayTheSame) {
  const Config config = config_on("pp=3,dp_shard=2", {"--model.tie_embeddings=true",
                                                      "--training.gradient_accumulation_steps=2"});
  comm::launch(
      6,
      [&](comm::Group& world) {
        const Mesh mesh(world, mesh_shape(config));
        const MeshScope scope(mesh);
        const auto model = make_model(config);
        const auto optimizer = make_optimizer(*model, config);
        const auto data = open_dataset(config);
        for (std::int64_t step = 0; step < 3; ++step)
          take_step(*model, *optimizer, step_batches(config, *data, mesh, 8 * step), 1e-2,
                    step_options(config));
        const Stored* w = model->tied_to_other_end();
        EXPECT_EQ(w != nullptr, mesh.coordinate(pp) != 1);
        const at::Tensor mine = w ? w->value.detach().clone() : at::zeros({48, 32}, at::kDouble);
        const at::Tensor all = mesh.group(pp)->all_gather(mine, {48, 48, 48});
        EXPECT_TRUE(at::equal(all.narrow(0, 0, 48), all.narrow(0, 96, 48)));
        EXPECT_GT(all.narrow(0, 0, 48).abs().sum().item<double>(), 0);
      },
      test_options());
}

}  // namespace
}  // namespace moesh::train
