// The MoE layer of nn on a GPU: on one rank the host never waits for the device, and a CUDA graph
// of the layer gives the bits that it gives without one; on several ranks, how often the host
// waits. N tokens, D model, F ffn, E experts, K top-k

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "moesh/fsdp/fsdp.h"
#include "moesh/nn/moe.h"
#include "tests/gpu/torch_cuda.h"
#include "tests/spmd/device.h"

namespace moesh {
namespace {

using enum Place;

struct Case {
  std::string name;
  nn::MoeConfig layer;
};

nn::MoeConfig layer_of(const nn::RouterConfig& router, const nn::RoutedExpertsConfig& experts,
                       std::int64_t shared_ffn) {
  nn::MoeConfig c;
  c.router = router, c.experts = experts, c.shared_ffn = shared_ffn;
  c.router.num_experts = c.experts.num_experts = 16;
  c.router.top_k = 4;
  c.experts.dim = 136, c.experts.ffn = 72;
  c.dtype = at::kBFloat16, c.device = test_device();
  c.init = {.kind = Init::Distribution::normal, .scale = 0.1, .seed = 7};
  return c;
}

// As the models have them.
std::vector<Case> cases() {
  using enum nn::Scoring;
  return {
      {"deepseek_v3",
       layer_of(
           {.scoring = sigmoid, .num_groups = 4, .top_groups = 2, .normalize = true, .scale = 2.5},
           {}, 72)},
      {"qwen3_moe", layer_of({.scoring = softmax, .normalize = true}, {}, 0)},
      {"mixtral", layer_of({.scoring = softmax_chosen}, {}, 0)},
      {"llama4", layer_of({.scoring = sigmoid, .choose_on_logits = true},
                          {.scores = kernels::ScoreSide::before}, 72)},
      {"gpt_oss", layer_of({.scoring = softmax_chosen, .gate_bias = true},
                           {.activation = kernels::Activation::clamped_swiglu, .biases = true}, 0)},
      {"gpt_oss, scores before", layer_of({.scoring = softmax_chosen, .gate_bias = true},
                                          {.activation = kernels::Activation::clamped_swiglu,
                                           .scores = kernels::ScoreSide::before,
                                           .biases = true},
                                          0)}};
}

// A layer, its input, and what one forward and backward leave.
struct Layer {
  nn::Moe moe;
  nn::Tokens tokens;
  at::Tensor x_BLD, y_BLD;

  Layer(const Mesh& mesh, const nn::MoeConfig& config)
      : moe(config), tokens(mesh, 2, 75, true), x_BLD(random_input(config)) {}

  at::Tensor random_input(const nn::MoeConfig& config) const {
    return at::randn({2, tokens.length(), config.experts.dim},
                     at::TensorOptions(config.device).dtype(config.dtype))
        .requires_grad_(true);
  }
  void run() {
    const auto y = moe(assume<Dense{T, T, T}>(x_BLD), tokens).y;
    backward(sum_all(cast(square(y), at::kFloat)));
    y_BLD = local(y).detach();
  }
  std::vector<at::Tensor> results() {
    std::vector<at::Tensor> all{y_BLD.clone(), x_BLD.grad().clone()};
    moe.each_param([&](auto& w) { all.push_back(w.stored().value.grad().clone()); });
    return all;
  }
  void clear() {
    x_BLD.mutable_grad() = at::Tensor();
    moe.each_param([](auto& w) { w.stored().value.mutable_grad() = at::Tensor(); });
  }
  void set_input(const at::Tensor& x) {
    const at::NoGradGuard no_grad;
    x_BLD.copy_(x);
  }
};

void on_mesh(const MeshShape& shape, const std::function<void(const Mesh&)>& f) {
  comm::launch(
      shape.num_ranks(),
      [&](comm::Group& world) {
        at::manual_seed(3 + world.rank());
        const Mesh mesh(world, shape);
        const MeshScope scope(mesh);
        f(mesh);
      },
      test_options());
}

TEST(MoeOnGpu, WaitsAreCounted) {
  on_mesh({}, [](const Mesh&) {
    const at::Tensor x = at::ones({3}, test_device());
    EXPECT_EQ(gpu::count_waits([&] { x.sum().item<float>(); }), 1);
    EXPECT_EQ(gpu::count_waits([&] { x.sum(); }), 0);
  });
}

TEST(MoeOnGpu, OneRankNeverWaits) {
  for (const Case& c : cases())
    on_mesh({}, [&](const Mesh& mesh) {
      Layer layer(mesh, c.layer);
      for (int i = 0; i < 2; ++i) layer.run();
      EXPECT_EQ(gpu::count_waits([&] { layer.run(); }), 0) << c.name;
    });
}

TEST(MoeOnGpu, AGraphGivesTheSameBits) {
  for (const Case& c : cases())
    on_mesh({}, [&](const Mesh& mesh) {
      Layer layer(mesh, c.layer);
      const at::Tensor inputs[] = {layer.random_input(c.layer).detach(),
                                   layer.random_input(c.layer).detach()};
      std::vector<std::vector<at::Tensor>> eager;
      for (const auto& x : inputs) {
        layer.set_input(x);
        layer.run();
        eager.push_back(layer.results());
        layer.clear();
      }
      gpu::Graph graph([&] { layer.run(); });
      for (const int i : {1, 0, 1}) {
        layer.set_input(inputs[i]);
        graph.replay();
        const auto replayed = layer.results();
        for (size_t t = 0; t < replayed.size(); ++t)
          EXPECT_TRUE(replayed[t].equal(eager[i][t])) << c.name << ", result " << t;
      }
      EXPECT_FALSE(eager[0][0].equal(eager[1][0])) << c.name;
    });
}

// Groups of threads meet on the host: each of their collectives waits for the device. Besides these
// the layer waits once, for the number of rows of each rank or of its own experts.
TEST(MoeOnGpu, SeveralRanksWaitOnceBesidesCollectives) {
  using enum nn::Dispatcher;
  for (const auto dispatcher : {all_to_all, all_gather})
    on_mesh({.tp = 2, .ep = 2}, [&](const Mesh& mesh) {
      nn::MoeConfig config = cases()[0].layer;
      config.dispatcher = dispatcher;
      Layer layer(mesh, config);
      for (int i = 0; i < 2; ++i) layer.run();
      const comm::Trace trace;
      const int waits = gpu::count_waits([&] { layer.run(); });
      const auto num_collectives = static_cast<int>(trace.entries().size());
      EXPECT_EQ(waits, 2 * num_collectives + 1) << to_string(dispatcher);
    });
}

}  // namespace
}  // namespace moesh
