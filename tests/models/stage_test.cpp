// A decoder cut into stages computes what one stage computes.

#include "moesh/models/stage.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>

#include "moesh/base/error.h"
#include "moesh/models/deepseek_v3.h"
#include "moesh/spmd/spmd.h"
#include "tests/spmd/device.h"

namespace moesh::models {
namespace {

struct Result {
  at::Tensor loss, auxiliary;
  std::vector<at::Tensor> counts_E;
  std::set<std::string> names;
  std::vector<at::Tensor> gradients;
  std::int64_t num_routers = 0, num_parameters = 0, num_active = 0;
  double flops = 0;
};

// The stages [0, cuts[0]), [cuts[0], cuts[1]), ..: one after the other, the stream handed on.
template <bool Sp>
Result run(const std::vector<std::int64_t>& cuts) {
  const DecoderPlan plan = DeepseekV3Config::named("tiny").plan();
  const ModelOptions m{.dtype = at::kDouble, .device = test_device(), .seed = 1};
  std::vector<std::unique_ptr<Stage>> stages;
  std::int64_t begin = 0;
  for (auto end : cuts) {
    stages.push_back(std::make_unique<Stage>(plan, m, LayerRange{begin, end}));
    begin = end;
  }
  const at::Tensor ids = at::arange(14).remainder(plan.config.vocab).reshape({2, 7});
  const MicroBatch batch{.input_ids_BL = ids.to(test_device()),
                         .labels_BL = (ids + 1).to(test_device()),
                         .num_step_tokens = at::full({}, 14, at::kDouble)};
  const ForwardOptions options{.sequence_parallel = Sp,
                               .auxiliary = {.switch_weight = 0.1, .z_weight = 0.01}};
  const nn::Tokens tokens = stages[0]->tokens_of(batch, options);
  auto x = stages[0]->embed<Sp>(batch, tokens, options);
  Result r;
  nn::TokenSum auxiliary;
  for (auto& s : stages) {
    const auto out = s->template run_blocks<Sp>(x, batch, tokens, options);
    x = out.x_BLD;
    if (local(out.auxiliary).defined())
      auxiliary = local(auxiliary).defined() ? auxiliary + out.auxiliary : out.auxiliary;
    for (const auto& c : out.counts_E) r.counts_E.push_back(local(c));
    r.num_routers += static_cast<std::int64_t>(s->routers().size());
    r.num_parameters += s->num_parameters(), r.num_active += s->num_active_parameters();
    r.flops += s->flops_per_token(7);
  }
  const auto loss = stages.back()->head<Sp>(x, batch, tokens, options);
  backward(loss + sum_all(auxiliary));
  for (auto& s : stages)
    s->each_param([&](Stored& w) {
      EXPECT_TRUE(r.names.insert(w.spec.name).second) << w.spec.name << " is in two stages";
      r.gradients.push_back(w.value.grad());
    });
  r.loss = local(loss).detach(), r.auxiliary = local(auxiliary).detach();
  return r;
}

template <bool Sp>
void expect_same_in_stages(const MeshShape& shape) {
  comm::launch(
      shape.num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, shape);
        const MeshScope scope(mesh);
        const Result one = run<Sp>({3}), three = run<Sp>({1, 2, 3});
        EXPECT_TRUE(at::equal(one.loss, three.loss));
        EXPECT_TRUE(at::allclose(one.auxiliary, three.auxiliary, 1e-14, 1e-14));
        ASSERT_EQ(one.counts_E.size(), three.counts_E.size());
        for (size_t i = 0; i < one.counts_E.size(); ++i)
          EXPECT_TRUE(at::equal(one.counts_E[i], three.counts_E[i]));
        EXPECT_EQ(one.names, three.names);
        ASSERT_EQ(one.gradients.size(), three.gradients.size());
        for (size_t i = 0; i < one.gradients.size(); ++i)
          EXPECT_TRUE(at::equal(one.gradients[i], three.gradients[i])) << i;
        EXPECT_EQ(one.num_routers, three.num_routers);
        EXPECT_EQ(one.num_parameters, three.num_parameters);
        EXPECT_EQ(one.num_active, three.num_active);
        EXPECT_DOUBLE_EQ(one.flops, three.flops);
      },
      test_options());
}

TEST(Stages, ComputeWhatOneStageComputes) {
  expect_same_in_stages<true>({});
  expect_same_in_stages<true>({.dp_shard = 2, .tp = 2, .ep = 2});
  expect_same_in_stages<false>({.tp = 2, .ep = 2});
}

TEST(Stages, RefuseBlocksThatTheDecoderDoesNotHave) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const DecoderPlan plan = DeepseekV3Config::named("tiny").plan();
  EXPECT_THROW(Stage(plan, {}, {0, 4}), Error);
  EXPECT_THROW(Stage(plan, {}, {2, 1}), Error);
}

}  // namespace
}  // namespace moesh::models
