// Counts of codes of float8 in a step: those of one rank on every mesh, however the step is
// divided.

#include "tests/train/float8_counts_check.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/fsdp/fsdp.h"
#include "moesh/train/metrics/record.h"
#include "tests/train/graphs_on_cpu.h"

namespace moesh::train {
namespace {

using float8_counts_check::config_of, float8_counts_check::counts;

TEST(Float8Counts, AreThoseOfOneRank) {
  const std::vector<std::string> ways[] = {
      {"--data.batch_size=4"},
      {"--activation_checkpoint.mode=selective"},
      {"--activation_checkpoint.mode=full"},
      {"--mesh=tp=2"},
      {"--mesh=tp=2", "--parallelism.sequence_parallel=false"},
      {"--mesh=tp=2,etp=2", "--activation_checkpoint.mode=full"},
      {"--mesh=cp=2"},
      {"--mesh=dp_shard=2", "--parallelism.fsdp_reshard_after_forward=true"},
      {"--mesh=dp_shard=2,ep=2", "--parallelism.moe_dispatcher=all_gather"},
      {"--mesh=dp_shard=2,ep=2", "--parallelism.overlap_experts=true"},
      {"--mesh=pp=2"},
      {"--mesh=pp=2", "--parallelism.pipeline_parallel_schedule=zero_bubble",
       "--activation_checkpoint.mode=selective"},
      {"--mesh=dp_shard=2,tp=2,ep=2"},
      {"--mesh=dp_replicate=2,cp=2,ep=2"},
      {"--mesh=tp=4,ep=2,etp=2"},
      {"--mesh=pp=2,dp_shard=2,ep=2", "--parallelism.overlap_experts=true"},
  };
  const at::Tensor one = counts({});
  for (const auto& way : ways) EXPECT_EQ(float8_counts_check::complaint(way, one), "") << way[0];
}

// How many numbers there are follows from the sizes.
TEST(Float8Counts, AreOfAllThatIsRounded) {
  const Config config = config_of({});
  const at::Tensor all = counts({});
  const auto& model = std::get<models::DeepseekV3Config>(config.model.architecture);
  const std::int64_t D = model.dim, F = model.moe_ffn, rows = 4 * 12 * model.top_k,
                     first_moe = model.num_dense_layers;
  const auto number = [&](std::int64_t layer, std::int64_t products, std::int64_t kind) {
    return all[layer][products][kind][0].item<std::int64_t>();
  };
  for (std::int64_t layer = 0; layer < 3; ++layer) {
    const bool is_moe = layer >= first_moe;
    EXPECT_EQ(number(layer, 0, 0), is_moe ? rows * (D + F) : 0) << layer;
    EXPECT_EQ(number(layer, 0, 1), is_moe ? rows * (D + 2 * F) : 0) << layer;
    EXPECT_EQ(number(layer, 0, 2), is_moe ? 3 * model.num_experts * D * F : 0) << layer;
    for (const std::int64_t kind : {0, 1, 2}) EXPECT_GT(number(layer, 1, kind), 0) << layer;
  }
  for (const auto& share : float8_shares(all))
    for (const auto* shares : {&share.zeros, &share.largest})
      for (const double s : *shares) EXPECT_TRUE(std::isnan(s) || (s >= 0 && s < 0.5)) << s;
  EXPECT_GT(all.select(3, 1).select(2, 0).sum().item<std::int64_t>(), 0) << "activations made 0";
  EXPECT_GT(all.select(3, 2).sum().item<std::int64_t>(), 0) << "codes of the largest magnitude";
}

TEST(Float8Counts, AreOfOneProjectionsOnly) {
  const at::Tensor dense = counts({"--training.float8=off"}),
                   experts = counts({"--training.float8_dense=off"});
  EXPECT_EQ(dense.select(1, 0).sum().item<std::int64_t>(), 0);
  EXPECT_EQ(experts.select(1, 1).sum().item<std::int64_t>(), 0);
  EXPECT_GT(dense.sum().item<std::int64_t>(), 0);
  EXPECT_GT(experts.sum().item<std::int64_t>(), 0);
}

// A step that counts is a graph of its own, and gives the same bits.
TEST(Float8Counts, DoNotChangeAStep) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const Config config = config_of({"--dtype=bfloat16"});
  const auto dataset = open_dataset(config);
  const auto run = [&](bool counts, UseGraph use) {
    GraphsOnCpu cpu;
    const auto model = make_model(config);
    const auto optimizer = make_optimizer(*model, config);
    cpu.model = model.get();
    Stepper stepper(*model, *optimizer, step_options(config), use, cpu.graphs());
    std::vector<at::Tensor> all;
    for (std::int64_t i = 0; i < 6; ++i) {
      const bool now = counts && i % 2 == 1;
      const StepResult r = stepper(step_batches(config, *dataset, mesh, i), 1e-2, now);
      EXPECT_EQ(r.gradients.float8_counts.defined(), now) << i;
      if (now) all.push_back(r.gradients.float8_counts);
    }
    if (counts && use == UseGraph::automatic) EXPECT_EQ(stepper.num_recorded(), 2);
    model->each_param([&](Stored& w, bool) { all.push_back(w.value.detach().clone()); });
    return all;
  };
  const auto plain = run(false, UseGraph::off), eager = run(true, UseGraph::off),
             graph = run(true, UseGraph::automatic);
  ASSERT_EQ(eager.size(), graph.size());
  for (std::size_t i = 0; i < eager.size(); ++i) EXPECT_TRUE(eager[i].equal(graph[i])) << i;
  for (std::size_t i = 0; i < plain.size(); ++i)
    EXPECT_TRUE(plain[i].equal(eager[eager.size() - plain.size() + i])) << i;
}

}  // namespace
}  // namespace moesh::train
