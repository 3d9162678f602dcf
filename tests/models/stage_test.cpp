// A decoder cut into stages computes what one stage computes.

#include "moesh/models/stage.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "moesh/base/error.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/models/configs.h"
#include "tests/counting_allocator.h"
#include "tests/spmd/device.h"

namespace moesh::models {
namespace {

[[maybe_unused]] const bool is_counting = (CountingAllocator::install(), true);

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
  const DecoderPlan plan = models::built_in<DeepseekV3Config>("tiny").plan();
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
                               .auxiliary = {.balance_weight = 0.1, .z_weight = 0.01}};
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
  const auto loss = stages.back()->head<Sp>(x, batch, tokens, options).cross_entropy;
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

// One rank.
struct Alone {
  std::shared_ptr<comm::Group> world = comm::solo_group();
  Mesh mesh{*world, {}};
  MeshScope scope{mesh};
};

ModelOptions in_fp64() { return {.dtype = at::kDouble, .device = test_device(), .seed = 1}; }

MicroBatch batch_of(std::int64_t batch, std::int64_t sequence) {
  const at::Tensor ids = at::arange(batch * sequence).remainder(96).reshape({batch, sequence});
  return {.input_ids_BL = ids.to(test_device()),
          .labels_BL = (ids + 1).remainder(96).to(test_device()),
          .num_step_tokens = at::full({}, batch * sequence, at::kDouble)};
}

// By hand: twice for each weight that a token meets in forward, four times in backward; the same
// for each query and key; none for a row of the embedding.
TEST(Stages, CountTheirFlops) {
  const Alone alone;
  constexpr std::int64_t L = 7;
  const MixtralConfig c = models::built_in<MixtralConfig>("tiny");
  const double attention = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim * c.dim,
               experts = c.num_experts * c.dim + c.top_k * 3 * c.dim * c.moe_ffn, norms = 2 * c.dim,
               pairs = 12.0 * c.num_heads * c.head_dim * (L + 1) / 2;
  const double expected =
      c.num_layers * (6 * (attention + experts + norms) + pairs) + 6 * (c.dim + c.vocab * c.dim);
  for (const bool is_tied : {false, true}) {
    DecoderPlan plan = c.plan();
    plan.config.tie_embeddings = is_tied;
    EXPECT_DOUBLE_EQ(Stage(plan, in_fp64(), {0, 3}).flops_per_token(L), expected);
    double sum = 0;
    for (std::int64_t i = 0; i < 3; ++i)
      sum += Stage(plan, in_fp64(), {i, i + 1}).flops_per_token(L);
    EXPECT_DOUBLE_EQ(sum, expected) << "in three stages, tied: " << is_tied;
  }
}

TEST(Stages, KnowWhichOfTheMixturesTheyHave) {
  const Alone alone;
  const DecoderPlan mixtral = models::built_in<MixtralConfig>("tiny").plan();
  const DecoderPlan deepseek =
      models::built_in<DeepseekV3Config>("tiny").plan();  // its first layer is dense
  EXPECT_FALSE(deepseek.is_moe(0));
  for (std::int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(Stage(mixtral, in_fp64(), {i, i + 1}).first_moe_layer(), i);
    EXPECT_EQ(Stage(deepseek, in_fp64(), {i, i + 1}).first_moe_layer(), std::max(i - 1, 0l));
  }
}

TEST(Stages, BeginWithBiasesOfTheWidthThatIsAskedFor) {
  const Alone alone;
  const auto deviation = [](double width) {
    GptOssConfig c = models::built_in<GptOssConfig>("tiny");
    c.bias_std = width;
    std::map<std::string, double> found;
    Stage(c.plan(), in_fp64(), {0, 3}).each_param([&](Stored& w) {
      if (w.spec.name.ends_with("q_proj.bias")) found[w.spec.name] = w.value.std().item<double>();
    });
    EXPECT_EQ(found.size(), 3u);
    return found.begin()->second;
  };
  EXPECT_NEAR(deviation(0.2), 0.2, 0.05);
  EXPECT_NEAR(deviation(5), 5, 1.25);
  EXPECT_EQ(deviation(0), 0);
}

class Watch : public nn::Probe {
 public:
  void on_input(const at::Tensor&) override { ++num_inputs; }
  at::Tensor on_choice(const nn::Choice& c) override {
    (c.pass == nn::Pass::recompute ? again : first).push_back(c.layer);
    return c.experts_NK;
  }
  bool wants_logits() const override { return true; }
  void on_logits(const at::Tensor&) override { ++num_logits; }
  int num_inputs = 0, num_logits = 0;
  std::vector<std::int64_t> first, again;
};

// What recompute computes twice, says of it, and holds from forward to backward.
TEST(Stages, ComputeAgainWhatRecomputeSays) {
  const Alone alone;
  std::vector<std::int64_t> held;
  for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
    Stage stage(models::built_in<MixtralConfig>("tiny").plan(), in_fp64(), {0, 3});
    Watch watch;
    const MicroBatch batch = batch_of(4, 64);
    const ForwardOptions options{.recompute = recompute, .probe = &watch};
    const nn::Tokens tokens = stage.tokens_of(batch, options);
    const auto x = stage.embed<true>(batch, tokens, options);
    const std::int64_t before = CountingAllocator::live;
    const auto out = stage.run_blocks<true>(x, batch, tokens, options);
    held.push_back(CountingAllocator::live - before);
    backward(stage.head<true>(out.x_BLD, batch, tokens, options).cross_entropy);
    EXPECT_EQ(watch.num_inputs, 1);
    EXPECT_EQ(watch.num_logits, 1);
    EXPECT_EQ(watch.first, (std::vector<std::int64_t>{0, 1, 2}));
    EXPECT_EQ(watch.again, recompute == Recompute::none ? std::vector<std::int64_t>{}
                                                        : std::vector<std::int64_t>({2, 1, 0}));
  }
  EXPECT_LT(held[1], 0.8 * static_cast<double>(held[0])) << "selective";
  EXPECT_LT(held[2], 0.5 * static_cast<double>(held[1])) << "full";
}

// With reshard, forward leaves no gathered parameter of a block behind, nor one that nobody waits
// for; without, all of them.
TEST(Stages, LeaveNoGatheredParametersBehind) {
  comm::launch(
      2,
      [&](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 2, .ep = 2});
        const MeshScope scope(mesh);
        const StepState step;
        Stage stage(models::built_in<MixtralConfig>("tiny").plan(), in_fp64(), {0, 3});
        for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
          const MicroBatch batch = batch_of(2, 7);
          const ForwardOptions options{.recompute = recompute, .reshard = true};
          const nn::Tokens tokens = stage.tokens_of(batch, options);
          const auto out = stage.run_blocks<true>(stage.embed<true>(batch, tokens, options), batch,
                                                  tokens, options);
          EXPECT_EQ(step.bytes().now, 0) << "after forward";
          backward(sum_all(flatten(out.x_BLD, 0, 2)));
          EXPECT_EQ(step.bytes().now, 0) << "after backward";
        }
      },
      test_options());
}

TEST(Stages, RefuseBlocksThatTheDecoderDoesNotHave) {
  const Alone alone;
  const DecoderPlan plan = models::built_in<DeepseekV3Config>("tiny").plan();
  EXPECT_THROW(Stage(plan, {}, {0, 4}), Error);
  EXPECT_THROW(Stage(plan, {}, {2, 1}), Error);
}

}  // namespace
}  // namespace moesh::models
