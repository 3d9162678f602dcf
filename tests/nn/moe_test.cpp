#include "moesh/nn/moe.h"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <bit>
#include <map>
#include <mutex>

#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "moesh/fsdp/fsdp.h"
#include "tests/comm/trace.h"
#include "tests/kernels/ref_moe.h"
#include "tests/nn/layer_parity.h"
#include "tests/spmd/device.h"

namespace moesh {
namespace {

using enum Place;
using verify::LayerCase;

const std::vector<MeshShape> kMoeMeshes{
    {.tp = 2},
    {.tp = 2, .ep = 2},
    {.tp = 2, .etp = 2},
    {.dp_shard = 2, .ep = 2},
    {.tp = 4, .ep = 2, .etp = 2, .ranks_per_node = 2},
    {.dp_shard = 2, .cp = 2, .tp = 2, .ep = 2, .etp = 2},
    {.dp_replicate = 2, .dp_shard = 2, .tp = 2, .ep = 4, .ranks_per_node = 2}};

LayerCase small_case() {
  LayerCase c;
  c.layer.router = {.num_experts = 8, .top_k = 3, .normalize = true};
  c.layer.experts = {.num_experts = 8, .dim = 6, .ffn = 5};
  c.options.dtype = at::kDouble;
  c.options.device = test_device();
  c.options.init = {.kind = Init::Distribution::normal, .scale = 0.5, .seed = 3};
  c.batch = 2, c.sequence = 7;
  return c;
}

// On every mesh, with all dispatchers and with sequence parallelism on and off.
void expect_parity(const LayerCase& base, const std::vector<MeshShape>& meshes = kMoeMeshes) {
  for (const auto& shape : meshes) {
    const auto reference = verify::run_reference(base, shape.dp_replicate * shape.dp_shard);
    std::vector<LayerCase> cases;
    for (auto dispatcher :
         {nn::Dispatcher::all_to_all, nn::Dispatcher::all_gather, nn::Dispatcher::two_hops})
      for (bool sp : {true, false}) {
        cases.push_back(base);
        cases.back().layer.dispatcher = dispatcher;
        cases.back().sequence_parallel = sp;
      }
    const std::vector<const verify::LayerResult*> references(cases.size(), &reference);
    const auto reports = verify::compare_layer(cases, references, shape, test_options());
    for (size_t i = 0; i < cases.size(); ++i)
      EXPECT_TRUE(reports[i].holds()) << reports[i].describe(cases[i], shape);
  }
}

TEST(Edge, SomeExpertsHaveNoToken) {
  LayerCase c = small_case();
  c.layer.router.top_k = 1;
  c.batch = 1, c.sequence = 3;
  expect_parity(c);
}

TEST(Edge, AllTokensOnTheSameExperts) {
  LayerCase c = small_case();
  c.identical_tokens = true;
  c.layer.router.top_k = 1;
  expect_parity(c);
}

// Tokens and gradients are the same numbers on every mesh, so they have the same codes in every
// type, also where nothing travels.
TEST(Float8Rows, AreThoseOfOneRank) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const std::int64_t shared : {0, 5}) {
      LayerCase c = small_case();
      c.options.float8.rows = 3;
      c.options.dtype = dtype, c.layer.shared_ffn = shared;
      c.replay = dtype != at::kDouble;
      auto meshes = kMoeMeshes;
      meshes.push_back({.dp_shard = 2});
      expect_parity(c, meshes);
      c.batch = 1, c.sequence = 1;  // ranks without a row
      expect_parity(c, meshes);
    }
}

// And they make a difference, forward and backward.
TEST(Float8Rows, AreRounded) {
  LayerCase c = small_case();
  const auto plain = verify::run_reference(c, 1);
  c.options.float8.rows = 3;
  const auto rounded = verify::run_reference(c, 1);
  for (const char* name : {"output", "d(x)", "d(moe.experts.w1)", "d(moe.experts.w2)"}) {
    const double off = ((plain[name] - rounded[name]).norm() / plain[name].norm()).item<double>();
    EXPECT_TRUE(off > 3e-3 && off < 0.1) << name << " differs by " << off;
  }
}

TEST(Edge, AllScoresEqual) {
  LayerCase c = small_case();
  c.equal_scores = true;
  expect_parity(c);
}

TEST(Edge, EveryExpertForEveryToken) {
  LayerCase c = small_case();
  c.layer.router.top_k = 8;
  expect_parity(c);
}

TEST(Edge, OneExpertARank) {
  LayerCase c = small_case();
  c.layer.router.num_experts = c.layer.experts.num_experts = 4;
  c.layer.router.top_k = 2;
  expect_parity(c, {{.tp = 4, .ep = 4, .ranks_per_node = 2},
                    {.dp_shard = 4, .ep = 4, .ranks_per_node = 1},
                    {.dp_shard = 2, .tp = 2, .ep = 4}});
}

TEST(Edge, OneTokenASequence) {
  LayerCase c = small_case();
  c.sequence = 1;
  expect_parity(c);
}

TEST(Edge, FewerTokensThanRanks) {
  LayerCase c = small_case();
  c.batch = 1, c.sequence = 2;
  c.layer.shared_ffn = 5;
  expect_parity(c, {{.tp = 4, .ep = 4, .ranks_per_node = 2},
                    {.tp = 8, .ep = 4, .etp = 2, .ranks_per_node = 4},
                    {.tp = 8, .ep = 8, .ranks_per_node = 4},
                    {.cp = 4, .tp = 2, .ep = 2}});
}

TEST(Edge, WidthThatDoesNotDivide) {
  LayerCase c = small_case();
  c.layer.experts.ffn = 3;  // on 4 ranks of etp: 1, 1, 1 and none
  c.layer.experts.biases = true;
  c.layer.experts.activation = kernels::Activation::clamped_swiglu;
  expect_parity(c, {{.tp = 4, .etp = 4}, {.dp_shard = 2, .tp = 2, .etp = 4}});
}

TEST(Edge, MoreStorageRanksThanExperts) {
  LayerCase c = small_case();
  c.layer.router.num_experts = c.layer.experts.num_experts = 2;
  c.layer.router.top_k = 1;
  expect_parity(c, {{.dp_shard = 8}, {.dp_shard = 4, .tp = 2, .ep = 2}});
}

TEST(Parity, InFloat32WithReplayedRouting) {
  LayerCase c = small_case();
  c.options.dtype = at::kFloat;
  c.layer.shared_ffn = 6;
  c.replay = true;
  expect_parity(c);
}

TEST(Parity, InBfloat16WithReplayedRouting) {
  LayerCase c = small_case();
  c.options.dtype = at::kBFloat16;
  c.layer.experts.dim = 32, c.layer.experts.ffn = 16;
  c.options.init.scale = 0.2;
  c.replay = true;
  expect_parity(c);
}

// Tokens return to their own place: experts that are the identity give back what came in.
TEST(Placement, IdentityExpertsReturnEveryTokenToItsPlace) {
  for (int s : {1, 2, 3, 4, 8})
    for (const bool over_experts : {false, true})
      comm::launch(
          s,
          [&](comm::Group& world) {
            const Mesh mesh(
                world, {.tp = s, .ep = over_experts ? s : 1, .ranks_per_node = s % 2 == 0 ? 2 : 0});
            const MeshScope scope(mesh);
            nn::MoeConfig config;
            config.router = {.num_experts = 8 * s, .top_k = 2, .normalize = true, .epsilon = 0};
            config.experts = {.num_experts = 8 * s, .dim = 4, .ffn = 4};
            const nn::ModuleOptions options{
                .dtype = at::kDouble,
                .device = test_device(),
                .init = {.kind = Init::Distribution::normal, .scale = 0.5, .seed = 2}};
            for (auto dispatcher : {nn::Dispatcher::all_to_all, nn::Dispatcher::all_gather,
                                    nn::Dispatcher::two_hops}) {
              config.dispatcher = dispatcher;
              nn::Moe moe(config, options);
              // w1 reads a feature that is always 1, w3 and w2 are the identity: every expert gives
              // silu(1) x.
              const at::NoGradGuard no_grad;
              moe.each_param([&](auto& w) {
                auto& value = w.stored().value;
                if (w.name() == "moe.gate.weight") return;
                value.zero_();
                if (w.name() == "moe.experts.w1")
                  value.select(2, 3).fill_(1);
                else
                  value.copy_(at::eye(4, value.options()).expand_as(value));
              });
              for (std::int64_t B : {1, 2, 3})
                for (std::int64_t L = 1; L <= 9; ++L) {
                  const nn::Tokens tokens(mesh, B, L, true);
                  // Cut from one whole tensor by the formula of uneven shards, written out.
                  at::Tensor whole = at::empty({B, L, 4}, at::kDouble);
                  for (std::int64_t i = 0; i < B * L; ++i) {
                    const double id = static_cast<double>(i) + 1;
                    whole.view({-1, 4})[i] = at::tensor({id, -id, 0.5 * id, 1.0}, at::kDouble);
                  }
                  const std::int64_t n = (L + s - 1) / s, first = std::min(world.rank() * n, L),
                                     length = std::clamp(L - world.rank() * n, std::int64_t{0}, n);
                  const at::Tensor x =
                      whole.narrow(1, first, length).contiguous().to(test_device());
                  ASSERT_EQ(tokens.length(), length);
                  for (std::int64_t i = 0; i < B * length; ++i)
                    EXPECT_EQ(static_cast<double>(tokens.global(LocalToken{i}).value) + 1,
                              x.reshape({-1, 4})[i][0].item<double>())
                        << "B " << B << " L " << L;
                  const auto out = moe(assume<Dense{T, T, T}>(x), tokens);
                  const double silu_of_one = 1 / (1 + std::exp(-1.0));
                  EXPECT_TRUE(at::allclose(local(out.y), x * silu_of_one, 1e-12, 1e-12))
                      << "B " << B << " L " << L << " ranks " << s;
                }
            }
          },
          test_options());
}

// The layer on one rank against a loop over tokens and experts that shares no code with it.
// On meshes whose experts are not the tp ranks, where each way calls the shared experts itself.
TEST(Edge, SharedExpertsBesideEveryDispatcher) {
  LayerCase c = small_case();
  c.layer.shared_ffn = 5;
  expect_parity(c, {{.dp_shard = 2, .ep = 2}, {.dp_shard = 4, .tp = 2, .ep = 4, .etp = 2}});
}

// The layer with shared experts less the layer without is their SwiGLU, written out.
TEST(Reference, SharedExpertsAddTheirSwiglu) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const at::NoGradGuard no_grad;
  const nn::Tokens tokens(mesh, 2, 7, true);
  const at::Tensor x = at::randn({2, 7, 6}, at::TensorOptions(at::kDouble).device(test_device()));
  const auto y = [&](nn::Moe& moe) { return local(moe(assume<Dense{T, T, T}>(x), tokens).y); };
  nn::MoeConfig config = small_case().layer;
  nn::Moe without(config, small_case().options);
  for (const std::int64_t ffn : {1, 5}) {
    config.shared_ffn = ffn;
    nn::Moe with(config, small_case().options);
    std::map<std::string, at::Tensor> weights;
    with.each_param([&](auto& w) { weights[w.name()] = w.stored().value.detach(); });
    const auto product = [&](const at::Tensor& t, const char* name) {
      return t.matmul(weights.at(std::string("moe.shared_experts.") + name + ".weight").t());
    };
    const at::Tensor expected =
        product(at::silu(product(x, "gate_proj")) * product(x, "up_proj"), "down_proj");
    EXPECT_GT(expected.abs().max().item<double>(), 1e-3);
    EXPECT_TRUE(at::allclose(y(with) - y(without), expected, 1e-10, 1e-12)) << ffn;
  }
}

TEST(Reference, OneRankAgreesWithTheSlowLoop) {
  namespace ref = kernels::ref;
  struct Kind {
    nn::Scoring scoring;
    ref::ScoreFunction score;
  };
  for (const Kind kind : {Kind{nn::Scoring::sigmoid, ref::ScoreFunction::sigmoid},
                          Kind{nn::Scoring::softmax, ref::ScoreFunction::softmax},
                          Kind{nn::Scoring::softmax_chosen, ref::ScoreFunction::softmax_of_chosen}})
    for (auto side : {kernels::ScoreSide::before, kernels::ScoreSide::after})
      for (bool gpt_oss : {false, true}) {
        const auto world = comm::solo_group();
        const Mesh mesh(*world, {});
        const MeshScope scope(mesh);
        nn::MoeConfig config;
        config.router = {.num_experts = 8,
                         .top_k = 3,
                         .scoring = kind.scoring,
                         .num_groups = 2,
                         .top_groups = 1,
                         .normalize = true,
                         .scale = 1.5,
                         .gate_bias = true};
        config.experts = {.num_experts = 8,
                          .dim = 6,
                          .ffn = 5,
                          .activation = gpt_oss ? kernels::Activation::clamped_swiglu
                                                : kernels::Activation::swiglu,
                          .scores = side,
                          .biases = gpt_oss};
        const nn::ModuleOptions options{
            .dtype = at::kDouble,
            .device = test_device(),
            .init = {.kind = Init::Distribution::normal, .scale = 0.6, .seed = 8}};
        nn::Moe moe(config, options);
        moe.router().expert_bias() =
            at::randn({8}, at::TensorOptions(at::kDouble).device(test_device())) * 0.1;
        const nn::Tokens tokens(mesh, 2, 9, true);
        const at::Tensor x =
            at::randn({2, 9, 6}, at::TensorOptions(at::kDouble).device(test_device()));
        const auto input = as_leaf(assume<Dense{T, T, T}>(x));
        const at::Tensor weights = at::randn_like(x);
        const auto out = moe(input, tokens);
        backward(sum_all(out.y * assume<Dense{T, T, T}>(weights)));

        std::map<std::string, at::Tensor> leaf;
        moe.each_param([&](auto& w) {
          leaf[w.name()] = w.stored().value.detach().cpu().clone().requires_grad_(true);
        });
        EXPECT_EQ(leaf.size(), gpt_oss ? 8u : 5u);  // gate and bias, w1, w3, w2; b1, b3, b2
        const auto of = [&](const char* name) {
          return leaf.contains(name) ? leaf[name] : at::Tensor();
        };
        const ref::MoeParameters parameters{
            of("moe.gate.weight"),
            of("moe.gate.bias"),
            moe.router().expert_bias().cpu(),
            {of("moe.experts.w1"), of("moe.experts.w3"), of("moe.experts.w2"), of("moe.experts.b1"),
             of("moe.experts.b3"), of("moe.experts.b2")}};
        const at::Tensor x_ref = x.cpu().clone().requires_grad_(true);
        const at::Tensor y_ref = ref::moe({.score = kind.score,
                                           .top_k = 3,
                                           .num_groups = 2,
                                           .top_groups = 1,
                                           .normalise = true,
                                           .epsilon = 1e-20,
                                           .scale = 1.5},
                                          {.activation = config.experts.activation, .scores = side},
                                          parameters, x_ref.reshape({18, 6}));
        (y_ref.reshape({2, 9, 6}) * weights.cpu()).sum().backward();
        const auto close = [](const at::Tensor& a, const at::Tensor& b) {
          return (a.cpu() - b).norm().item<double>() <=
                 1e-10 * std::max(1e-3, b.norm().item<double>());
        };
        EXPECT_TRUE(close(local(out.y).detach(), y_ref.detach().reshape({2, 9, 6})));
        EXPECT_TRUE(close(local(input).grad(), x_ref.grad()));
        moe.each_param([&](auto& w) {
          EXPECT_TRUE(close(w.stored().value.grad(), leaf[w.name()].grad())) << w.name();
        });
      }
}

// A hundred steps of SGD on a regression: the same curve on every mesh as on one rank, with the
// bias moving.
std::vector<double> train_curve(const MeshShape& shape, int total_batch) {
  std::vector<double> losses(100);
  comm::launch(
      shape.num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, shape);
        const MeshScope scope(mesh);
        nn::MoeConfig config;
        config.router = {.num_experts = 8, .top_k = 2, .normalize = true};
        config.experts = {.num_experts = 8, .dim = 6, .ffn = 8};
        config.shared_ffn = 4;
        const nn::ModuleOptions options{
            .dtype = at::kDouble,
            .device = test_device(),
            .init = {.kind = Init::Distribution::normal, .scale = 0.4, .seed = 21}};
        nn::Moe moe(config, options);
        const std::int64_t B = total_batch / mesh.size(dp), L = 7;
        const nn::Tokens tokens(mesh, B, L, true);
        const SequenceShard shard(B, L, mesh.size(kSequenceAxes), mesh.coordinate(kSequenceAxes));
        for (int step = 0; step < 100; ++step) {
          // Data by global token: y = a fixed nonlinear function of x.
          at::Tensor x = at::empty({total_batch, L, 6}, at::kDouble);
          const Random random(static_cast<std::uint64_t>(step), "data");
          for (std::int64_t i = 0; i < x.numel(); ++i)
            x.data_ptr<double>()[i] = random.normal(static_cast<std::uint64_t>(i));
          const at::Tensor target = (x.roll(1, -1) * 0.7).tanh();
          const auto mine = [&](const at::Tensor& t) {
            return t.narrow(0, mesh.coordinate(dp) * B, B)
                .narrow(1, shard.start(), shard.length())
                .to(test_device());
          };
          const auto input = assume<Dense{T, T, T}>(mine(x));
          const auto out = moe(input, tokens);
          const auto minus_target = assume<Dense{T, T, T}>(-mine(target));
          const auto loss = scale(sum_all(square(out.y + minus_target)),
                                  1.0 / static_cast<double>(total_batch * L));
          backward(loss);
          if (world.rank() == 0)
            losses[static_cast<size_t>(step)] = number(all_reduce<kTokenAxes>(loss));
          else
            all_reduce<kTokenAxes>(loss);
          const at::NoGradGuard no_grad;
          moe.each_param([](auto& w) {
            auto& value = w.stored().value;
            value.sub_(value.grad() * 0.2);
            value.mutable_grad().reset();
          });
          moe.router().update_bias(0.001);
        }
      },
      test_options());
  return losses;
}

TEST(Training, AHundredStepsFollowTheSingleRankCurve) {
  const auto alone = train_curve({}, 8);
  EXPECT_LT(alone[99], 0.8 * alone[0]) << "it learns";
  for (const auto& shape :
       {MeshShape{.tp = 2}, MeshShape{.tp = 2, .ep = 2}, MeshShape{.tp = 2, .etp = 2},
        MeshShape{.tp = 4, .ep = 4}, MeshShape{.dp_shard = 2}, MeshShape{.dp_shard = 2, .ep = 2},
        MeshShape{.dp_shard = 4, .ep = 2, .etp = 2}, MeshShape{.cp = 2, .tp = 2, .ep = 4},
        MeshShape{.dp_replicate = 2, .dp_shard = 2, .ep = 2},
        MeshShape{.dp_shard = 2, .cp = 2, .tp = 2, .ep = 2, .etp = 2}}) {
    const auto curve = train_curve(shape, 8);
    for (size_t i = 0; i < 100; ++i)
      ASSERT_NEAR(curve[i], alone[i], 1e-9 * alone[0]) << shape.describe() << " step " << i;
  }
}

// Exactly these collectives, in this order.
std::vector<std::string> trace(const MeshShape& shape, nn::Dispatcher dispatcher,
                               std::int64_t shared, bool sp, bool is_backward) {
  std::vector<std::string> lines;
  comm::launch(
      shape.num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, shape);
        const MeshScope scope(mesh);
        LayerCase c = small_case();
        c.layer.dispatcher = dispatcher;
        c.layer.shared_ffn = shared;
        nn::Moe moe(c.layer, c.options);
        const nn::Tokens tokens(mesh, 2, 8, sp);
        const at::Tensor x = at::randn({2, tokens.length(), 6},
                                       at::TensorOptions(at::kDouble).device(test_device()));
        const auto record = [&](const comm::Trace& t) {
          if (world.rank() != 0) return;
          for (const auto& e : t.entries()) lines.push_back(e.group + " " + comm::to_string(e.op));
        };
        const auto run = [&](const auto& input) {
          const comm::Trace forward;
          const auto out = moe(input, tokens);
          if (!is_backward) return record(forward);
          const comm::Trace backward_trace;
          local(out.y).sum().backward();
          record(backward_trace);
        };
        if (sp)
          run(as_leaf(assume<Dense{T, T, T}>(x)));
        else
          run(as_leaf(assume<Dense{T, T, I}>(at::ones_like(x))));
      },
      test_options());
  return lines;
}

using Lines = std::vector<std::string>;

TEST(Trace, TensorParallelExperts) {  // ep = 1, etp = tp
  const MeshShape shape{.tp = 2, .etp = 2};
  EXPECT_EQ(trace(shape, nn::Dispatcher::all_to_all, 0, true, false),
            (Lines{"etp all_gather", "etp all_gather", "etp reduce_scatter"}))
      << "counts, rows with their scores, and one reduction";
  EXPECT_EQ(trace(shape, nn::Dispatcher::all_to_all, 0, true, true),
            (Lines{"etp all_gather", "etp all_to_all", "tp all_reduce"}))
      << "d(y), the terms of d(rows) with those of d(scores), and the gate "
         "once";
}

TEST(Trace, ExpertsOnTheTensorParallelRanks) {  // tp2ep
  const MeshShape shape{.tp = 2, .ep = 2};
  EXPECT_EQ(trace(shape, nn::Dispatcher::all_to_all, 0, true, false),
            (Lines{"ep all_gather", "ep all_to_all", "ep all_to_all"}));
  EXPECT_EQ(trace(shape, nn::Dispatcher::all_to_all, 0, true, true),
            (Lines{"ep all_to_all", "ep all_to_all", "tp all_reduce"}));
}

TEST(Trace,
     ExpertsOnTheDataParallelRanks) {  // dp2ep: the gate is stored in shards,
                                       // the experts are not
  const MeshShape shape{.dp_shard = 2, .ep = 2};
  EXPECT_EQ(trace(shape, nn::Dispatcher::all_to_all, 0, true, false),
            (Lines{"dp_shard all_gather", "ep all_gather", "ep all_to_all", "ep all_to_all"}));
  EXPECT_EQ(trace(shape, nn::Dispatcher::all_to_all, 0, true, true),
            (Lines{"ep all_to_all", "ep all_to_all", "dp_shard reduce_scatter"}));
}

TEST(Trace, ExpertAndExpertTensorParallel) {
  const MeshShape shape{.tp = 4, .ep = 2, .etp = 2};
  EXPECT_EQ(trace(shape, nn::Dispatcher::all_to_all, 0, true, false),
            (Lines{"ep|etp all_gather", "ep all_to_all", "etp all_gather", "etp reduce_scatter",
                   "ep all_to_all"}));
  EXPECT_EQ(trace(shape, nn::Dispatcher::all_to_all, 0, true, true),
            (Lines{"ep all_to_all", "etp all_gather", "etp all_to_all", "ep all_to_all",
                   "tp all_reduce"}))
      << "d(y); d(rows) with d(scores); the gate once";
}

TEST(Trace, TwoHops) {
  const MeshShape shape{.tp = 8, .ep = 4, .etp = 2, .ranks_per_node = 4};
  EXPECT_EQ(trace(shape, nn::Dispatcher::two_hops, 0, true, false),
            (Lines{"ep_nodes all_gather", "ep_nodes all_to_all", "ep_inside|etp all_gather",
                   "ep_inside all_to_all", "etp all_gather", "etp reduce_scatter",
                   "ep_inside all_to_all", "ep_nodes all_to_all"}))
      << "counts and rows to the nodes, counts and rows inside; and both ways back";
  EXPECT_EQ(
      trace(shape, nn::Dispatcher::two_hops, 0, true, true),
      (Lines{"ep_nodes all_to_all", "ep_inside all_to_all", "etp all_gather", "etp all_to_all",
             "ep_inside all_to_all", "ep_nodes all_to_all", "tp all_reduce"}));
  // On one node the first hop stays at home, and on nodes of one rank the second.
  EXPECT_EQ(trace({.tp = 2, .ep = 2}, nn::Dispatcher::two_hops, 0, true, false),
            trace({.tp = 2, .ep = 2}, nn::Dispatcher::all_to_all, 0, true, false));
  EXPECT_EQ(
      trace({.tp = 2, .ep = 2, .ranks_per_node = 1}, nn::Dispatcher::two_hops, 0, true, false),
      trace({.tp = 2, .ep = 2}, nn::Dispatcher::all_to_all, 0, true, false));
}

TEST(Trace, AllGatherOverTpSharesItsGatherAndItsReduction) {
  const MeshShape shape{.tp = 2, .ep = 2};
  EXPECT_EQ(trace(shape, nn::Dispatcher::all_gather, 4, true, false),
            (Lines{"tp all_gather", "tp reduce_scatter"}))
      << "x, scores and choices; one reduction for routed and shared experts";
  EXPECT_EQ(trace(shape, nn::Dispatcher::all_gather, 4, true, true),
            (Lines{"tp all_gather", "tp all_to_all", "tp all_reduce"}));
  EXPECT_EQ(trace(shape, nn::Dispatcher::all_gather, 4, false, false),
            (Lines{"tp all_gather", "tp all_reduce"}))
      << "without sequence parallelism x is everywhere already";
}

// In bfloat16: a row of 6 features has 12 bytes, and its score 4 more; over all ranks, since the
// router decides how many rows each sends.
TEST(Trace, AMessageHasTheRowsAndTheirScores) {
  const auto bytes = [](const MeshShape& shape, nn::Dispatcher dispatcher, std::int64_t k = 0) {
    std::mutex mutex;
    std::map<std::string, std::int64_t> sums;
    comm::launch(
        shape.num_ranks(),
        [&](comm::Group& world) {
          const Mesh mesh(world, shape);
          const MeshScope scope(mesh);
          LayerCase c = small_case();
          c.options.dtype = at::kBFloat16;
          c.layer.dispatcher = dispatcher;
          if (k > 0) c.layer.router.top_k = k;
          nn::Moe moe(c.layer, c.options);
          const nn::Tokens tokens(mesh, 2, 8, true);
          const auto x = as_leaf(assume<Dense{T, T, T}>(
              at::randn({2, tokens.length(), 6}, at::TensorOptions(at::kDouble))
                  .to(test_device(), at::kBFloat16)));
          const auto record = [&](const std::string& pass, const comm::Trace& t) {
            const std::lock_guard lock(mutex);
            for (const auto& e : t.entries())
              sums[pass + " " + e.group + " " + comm::to_string(e.op)] += e.bytes;
          };
          const comm::Trace forward;
          const auto out = moe(x, tokens);
          record("forward", forward);
          const comm::Trace backward_trace;
          local(out.y).sum().backward();
          record("backward", backward_trace);
        },
        test_options());
    return sums;
  };
  const std::int64_t top_k = small_case().layer.router.top_k, tokens = 16, rows = tokens * top_k;
  constexpr std::int64_t kRow = 6 * 2, kScore = 4;
  auto sums = bytes({.tp = 2, .ep = 2}, nn::Dispatcher::all_to_all);
  EXPECT_EQ(sums["forward ep all_to_all"], rows * (kRow + kScore) + rows * kRow);
  EXPECT_EQ(sums["backward ep all_to_all"], rows * kRow + rows * (kRow + kScore));
  sums = bytes({.tp = 2, .etp = 2}, nn::Dispatcher::all_to_all);
  EXPECT_EQ(sums["forward etp all_gather"],
            2 * small_case().layer.router.num_experts * 8 + rows * (kRow + kScore));
  EXPECT_EQ(sums["backward etp all_to_all"], 2 * rows * (kRow + kScore)) << "of two ranks' terms";
  sums = bytes({.tp = 2, .ep = 2}, nn::Dispatcher::all_gather);
  EXPECT_EQ(sums["forward tp all_gather"], tokens * (kRow + top_k * (kScore + 4)))
      << "k scores and k numbers of experts a token";
  EXPECT_EQ(sums["backward tp all_to_all"], 2 * tokens * (kRow + top_k * kScore));
  // Each of two nodes has some of all 8 experts, and a token goes to both, once.
  sums = bytes({.tp = 4, .ep = 4, .ranks_per_node = 2}, nn::Dispatcher::two_hops, 8);
  EXPECT_EQ(sums["forward ep_nodes all_to_all"],
            2 * tokens * (kRow + 8 * (kScore + 4)) + 2 * tokens * kRow)
      << "there with k scores and k numbers of experts, and back";
  EXPECT_EQ(sums["backward ep_nodes all_to_all"],
            2 * tokens * kRow + 2 * tokens * (kRow + 8 * kScore));
  EXPECT_EQ(sums["forward ep_inside all_to_all"], 8 * tokens * (kRow + kScore + kRow));
}

// Every choice of K experts, in the groups that a router may take, is counted once.
TEST(Dispatcher, TheMeanNumberOfNodesIsThatOfAllChoices) {
  const auto counted = [](const nn::RouterConfig& r, int num_nodes) {
    const std::int64_t in_group = r.num_experts / r.num_groups;
    double sum = 0, num = 0;
    for (unsigned groups = 0; groups < 1u << r.num_groups; ++groups) {
      if (std::popcount(groups) != r.top_groups) continue;
      for (unsigned chosen = 0; chosen < 1u << r.num_experts; ++chosen) {
        if (std::popcount(chosen) != r.top_k) continue;
        unsigned nodes = 0;
        bool is_allowed = true;
        for (std::int64_t e = 0; e < r.num_experts; ++e) {
          if ((chosen >> e & 1) == 0) continue;
          is_allowed = is_allowed && (groups >> (e / in_group) & 1) != 0;
          nodes |= 1u << (e * num_nodes / r.num_experts);
        }
        if (is_allowed) sum += std::popcount(nodes), ++num;
      }
    }
    return sum / num;
  };
  for (const int nodes : {1, 2, 4})
    for (const nn::RouterConfig& r :
         {nn::RouterConfig{.num_experts = 8, .top_k = 1},
          nn::RouterConfig{.num_experts = 8, .top_k = 2},
          nn::RouterConfig{.num_experts = 8, .top_k = 8},
          nn::RouterConfig{.num_experts = 12, .top_k = 3, .num_groups = 4, .top_groups = 2},
          nn::RouterConfig{.num_experts = 12, .top_k = 2, .num_groups = 2, .top_groups = 1},
          nn::RouterConfig{.num_experts = 8, .top_k = 4, .num_groups = 4, .top_groups = 4}})
      EXPECT_NEAR(nn::mean_nodes(r, nodes), counted(r, nodes), 1e-12)
          << nodes << " nodes, " << r.top_k << " of " << r.num_experts;
  // In turn: tokens 0 to 7 take experts 0-2, 3-5, 6-8, 9-11 of nodes of four.
  const nn::RouterConfig in_turn{.num_experts = 12, .top_k = 3, .forced_balance = true};
  EXPECT_EQ(nn::mean_nodes(in_turn, 3), 1.5);
}

TEST(Dispatcher, AutomaticTakesTwoHopsWhereNodesAreFarApart) {
  const auto way = [](const MeshShape& s, std::int64_t k, nn::Transport exchange) {
    return nn::resolve(nn::Dispatcher::automatic, s.validated(), {.num_experts = 64, .top_k = k},
                       exchange);
  };
  const MeshShape nodes{.dp_shard = 32, .ep = 32, .ranks_per_node = 8};
  EXPECT_EQ(way(nodes, 8, nn::Transport::nccl), nn::Dispatcher::two_hops);
  EXPECT_EQ(way({.dp_shard = 32, .ep = 32}, 8, nn::Transport::nccl), nn::Dispatcher::all_to_all);
  EXPECT_EQ(way(nodes, 1, nn::Transport::nccl), nn::Dispatcher::all_to_all)
      << "one row: no node gets a second";
  EXPECT_EQ(way({.dp_shard = 6, .ep = 6, .ranks_per_node = 4}, 2, nn::Transport::nccl),
            nn::Dispatcher::all_to_all)
      << "nodes that do not share ep evenly";
  // 5/3 nodes, the other one of half of the tokens, 9 times as far; 2 rows, half of which move
  // inside.
  EXPECT_EQ(nn::describe_choice(nn::Transport::nccl,
                                MeshShape{.dp_shard = 4, .ep = 4, .ranks_per_node = 2}.validated(),
                                {.num_experts = 4, .top_k = 2}),
            "two_hops on dp_shard=4 ep=4 ranks_per_node=2: it costs 8.5, all_to_all 9.5, "
            "all_gather 11 (NCCL: rows that a rank sends for each token)");
}

TEST(MoeErrors, NameTheValueAndTheCure) {
  const auto message = [](const std::function<void(const Mesh&)>& f, const MeshShape& shape = {}) {
    std::string text = "nothing was thrown";
    try {
      comm::launch(
          shape.num_ranks(),
          [&](comm::Group& world) {
            const Mesh mesh(world, shape);
            const MeshScope scope(mesh);
            f(mesh);
          },
          test_options());
    } catch (const Error& e) {
      text = e.what();
    }
    return text;
  };
  EXPECT_EQ(message(
                [](const Mesh&) {
                  LayerCase c = small_case();
                  c.layer.router.num_experts = c.layer.experts.num_experts = 7;
                  nn::Moe moe(c.layer, c.options);
                },
                {.tp = 2, .ep = 2}),
            "experts: num_experts = 7 is not divisible by ep = 2; every rank of "
            "ep holds the same number of experts");
  EXPECT_EQ(message(
                [](const Mesh&) {
                  LayerCase c = small_case();
                  c.layer.dispatcher = nn::Dispatcher::local;
                  nn::Moe moe(c.layer, c.options);
                },
                {.tp = 2, .ep = 2}),
            "dispatcher 'local' needs ep = etp = 1; here ep = 2, etp = 1. Use "
            "'auto', 'all_to_all' or 'all_gather'.");
  EXPECT_EQ(message(
                [](const Mesh&) {
                  LayerCase c = small_case();
                  c.layer.router.num_experts = c.layer.experts.num_experts = 6;
                  c.layer.dispatcher = nn::Dispatcher::two_hops;
                  nn::Moe moe(c.layer, c.options);
                },
                {.dp_shard = 3, .ep = 3, .ranks_per_node = 2}),
            "dispatcher 'two_hops' needs nodes with the same number of ranks of ep on each; here "
            "ep = 3, etp = 1, and a node has 2 ranks. Use 'auto', 'all_to_all' or 'all_gather'.");
  EXPECT_EQ(message([](const Mesh& mesh) {
              nn::Moe moe(small_case().layer, small_case().options);
              moe(assume<Dense{T, T, T}>(at::zeros({2, 5, 6}, at::kDouble)),
                  nn::Tokens(mesh, 2, 7, true));
            }),
            "moe: x is [2, 5, 6], and the tokens say [2, 7, D]");
}

// Where nothing was measured, rows that are sent decide.
TEST(Dispatcher, AutomaticSendsFewerRowsUnderNccl) {
  const auto way = [](const MeshShape& s, std::int64_t k) {
    return nn::resolve(nn::Dispatcher::automatic, s.validated(), {.top_k = k}, nn::Transport::nccl);
  };
  EXPECT_EQ(way({}, 8), nn::Dispatcher::local);
  EXPECT_EQ(way({.tp = 8, .ep = 8}, 1), nn::Dispatcher::all_to_all);
  EXPECT_EQ(way({.tp = 2, .ep = 2}, 8), nn::Dispatcher::all_gather);
  EXPECT_EQ(way({.tp = 4, .etp = 4}, 2), nn::Dispatcher::all_gather);
  EXPECT_EQ(way({.tp = 4, .ep = 4}, 3), nn::Dispatcher::all_to_all);  // 9/4 rows against 3
  EXPECT_EQ(way({.tp = 2, .ep = 2}, 2), nn::Dispatcher::all_gather);  // one row each: one message
  EXPECT_EQ(nn::describe_choice(nn::Transport::nccl, MeshShape{.tp = 2, .ep = 2}.validated(),
                                {.top_k = 2}),
            "all_gather on tp=2 ep=2: it costs 1, all_to_all 1 (NCCL: rows that a rank sends for "
            "each token)");
}

// One process that a launcher started is a launched run, too.
TEST(Dispatcher, TheExchangeIsThatOfTheLauncher) {
  const at::Device cpu(at::kCPU), gpu(at::kCUDA), first_gpu(at::kCUDA, 0);
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"})
    ASSERT_EQ(std::getenv(name), nullptr) << "this test starts without a launcher";
  EXPECT_EQ(nn::transport_of(cpu), nn::Transport::threads_on_cpu);
  EXPECT_EQ(nn::transport_of(gpu), nn::Transport::threads_on_gpu);
  EXPECT_EQ(nn::planned_exchange(cpu), nn::Transport::threads_on_cpu);
  EXPECT_EQ(nn::planned_exchange(gpu), nn::Transport::nccl);
  EXPECT_EQ(nn::planned_exchange(first_gpu), nn::Transport::threads_on_gpu);
  for (const char* processes : {"1", "2"}) {
    setenv("OMPI_COMM_WORLD_SIZE", processes, 1);
    EXPECT_EQ(nn::transport_of(cpu), nn::Transport::mpi);
    EXPECT_EQ(nn::transport_of(gpu), nn::Transport::nccl);
  }
  unsetenv("OMPI_COMM_WORLD_SIZE");
}

// The tables of docs/performance.md, "Dispatchers": the times of both, in ms.
struct MeasuredMesh {
  MeshShape mesh;
  double all_to_all, all_gather;
};

void expect_faster_one(nn::Transport exchange, std::int64_t top_k,
                       const std::vector<MeasuredMesh>& table) {
  for (const auto& [mesh, rows, tokens] : table) {
    EXPECT_EQ(nn::resolve(nn::Dispatcher::automatic, mesh.validated(), {.top_k = top_k}, exchange),
              rows < tokens ? nn::Dispatcher::all_to_all : nn::Dispatcher::all_gather)
        << nn::to_string(exchange) << ", " << mesh.validated().describe();
  }
}

TEST(Dispatcher, AutomaticTakesTheFasterOneWhereItWasMeasured) {
  expect_faster_one(nn::Transport::threads_on_gpu, 6,
                    {{{.tp = 2, .ep = 2}, 33.6, 32.9},
                     {{.tp = 2, .etp = 2}, 43.7, 30.3},
                     {{.tp = 4, .ep = 4}, 34.1, 39.7},
                     {{.tp = 4, .ep = 2, .etp = 2}, 44.4, 40.8},
                     {{.tp = 8, .ep = 8}, 35.9, 54.9},
                     {{.tp = 8, .ep = 4, .etp = 2}, 45.9, 57.2}});
  EXPECT_EQ(nn::describe_choice(nn::Transport::threads_on_gpu,
                                MeshShape{.tp = 4, .ep = 4}.validated(), {.top_k = 6}),
            "all_to_all on tp=4 ep=4: it costs 7.2, all_gather 12 (threads on a GPU: time, as "
            "measured)");
}

}  // namespace
}  // namespace moesh
