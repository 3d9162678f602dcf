// The MoE layer of nn on a GPU: on one rank the host never waits for the device, and a CUDA graph
// of the layer gives the bits that it gives without one; on several ranks, how often the host
// waits. LoRA on experts by own kernels is what merged weights give in float64.
// N, T tokens, D model, F ffn, E experts, K top-k, R rows at their experts, r rank

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "moesh/fsdp/fsdp.h"
#include "moesh/kernels/experts.h"
#include "moesh/kernels/gpu_kernels.h"
#include "moesh/kernels/routing.h"
#include "moesh/nn/moe.h"
#include "tests/comm/trace.h"
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
      : moe(config, {.dtype = at::kBFloat16,
                     .device = test_device(),
                     .init = {.kind = Init::Distribution::normal, .scale = 0.1, .seed = 7}}),
        tokens(mesh, 2, 75, true),
        x_BLD(random_input(config)) {}

  at::Tensor random_input(const nn::MoeConfig& config) const {
    return at::randn({2, tokens.length(), config.experts.dim},
                     at::TensorOptions(test_device()).dtype(at::kBFloat16))
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

// ---- LoRA on experts ----

// How tokens choose: at random, all the same experts, or only the even ones (the others stay
// without rows).
enum class Load { random, one, even };

struct LoraCase {
  std::int64_t T, D, F, E, K;
  std::int64_t rank13, rank2;  // 0: no LoRA there
  Load load = Load::random;
};
struct LoraOptions {
  kernels::ExpertsConfig config;
  bool biases, indexed;
};

struct LoraProblem {
  kernels::ExpertsWeights weights;
  kernels::ExpertsInput input;
  at::Tensor dy;
};

LoraProblem problem_of(const LoraCase& c, const LoraOptions& o) {
  const auto normal = [](at::IntArrayRef sizes, double scale) {
    return at::randn(sizes, at::TensorOptions(test_device()).dtype(at::kFloat))
        .mul_(scale)
        .to(at::kBFloat16);
  };
  const auto root = [](std::int64_t n) { return 1 / std::sqrt(static_cast<double>(n)); };
  LoraProblem p;
  auto& w = p.weights;
  w.w1_eFD = normal({c.E, c.F, c.D}, root(c.D)), w.w3_eFD = normal({c.E, c.F, c.D}, root(c.D));
  w.w2_eDF = normal({c.E, c.D, c.F}, root(c.F));
  if (o.biases) {
    w.b1_eF = normal({c.E, c.F}, 0.5), w.b3_eF = normal({c.E, c.F}, 0.5);
    w.b2_eD = normal({c.E, c.D}, 0.5);
  }
  // What LoRA adds is as large as what it adds to.
  w.lora.scale13 = 0.7, w.lora.scale2 = 1.3;
  if (c.rank13 > 0) {
    w.lora.a13_erD = normal({c.E, c.rank13, c.D}, root(c.D));
    w.lora.b13_e2Fr = normal({c.E, 2, c.F, c.rank13}, root(c.rank13));
  }
  if (c.rank2 > 0) {
    w.lora.a2_erF = normal({c.E, c.rank2, c.F}, root(c.F));
    w.lora.b2_eDr = normal({c.E, c.D, c.rank2}, root(c.rank2));
  }
  at::Tensor wish = at::rand({c.T, c.E}, at::TensorOptions(test_device()));
  const at::Tensor number = at::arange(c.E, wish.options());
  if (c.load == Load::one) wish = number.expand({c.T, c.E});
  if (c.load == Load::even) wish = wish - 2 * at::remainder(number, 2);
  const auto s = kernels::sort_by_expert(std::get<1>(wish.topk(c.K, 1)), c.E);
  const at::Tensor x = normal({c.T, c.D}, 1);
  p.input = {.x = x, .ends_e = s.ends_e};
  if (o.config.scores != kernels::ScoreSide::none)
    p.input.scores_R = at::rand({c.T * c.K}, wish.options()).add_(0.1);
  p.dy = normal({c.T, c.D}, 1);
  if (o.indexed)
    p.input.token_R = s.token_R, p.input.inverse_TK = s.inverse_TK;
  else
    p.input.x = kernels::gather_rows(x, s.token_R), p.dy = kernels::gather_rows(p.dy, s.token_R);
  return p;
}

struct LoraResults {
  at::Tensor y, x, scores_R;
  kernels::ExpertsLora lora;
  bool has_others = false;  // gradients of what is frozen

  std::vector<std::pair<const char*, at::Tensor>> listed() const {
    return {{"y", y},
            {"d(x)", x},
            {"d(scores)", scores_R},
            {"d(a13)", lora.a13_erD},
            {"d(b13)", lora.b13_e2Fr},
            {"d(a2)", lora.a2_erF},
            {"d(b2)", lora.b2_eDr}};
  }
};

LoraResults with_lora(const LoraProblem& p, kernels::ExpertsConfig config, bool later) {
  config.weights_later = later;
  auto out = kernels::experts_forward(config, p.weights, p.input);
  auto d = kernels::experts_backward(config, p.weights, std::move(out.saved), p.dy);
  EXPECT_EQ(d.weights_later != nullptr, later);
  const auto w = later ? d.weights_later() : d.weights;
  const bool has_others = w.w1_eFD.defined() || w.w3_eFD.defined() || w.w2_eDF.defined() ||
                          w.b1_eF.defined() || w.b3_eF.defined() || w.b2_eD.defined();
  return {out.y, d.x, d.scores_R, w.lora, has_others};
}

// Merged weights in float64, and the gradients of a and b that follow from theirs.
LoraResults merged(const LoraProblem& p, const kernels::ExpertsConfig& config) {
  const auto wide = [](const at::Tensor& t) { return t.defined() ? t.to(at::kDouble) : t; };
  const auto& w = p.weights;
  const at::Tensor a13 = wide(w.lora.a13_erD), b13 = wide(w.lora.b13_e2Fr),
                   a2 = wide(w.lora.a2_erF), b2 = wide(w.lora.b2_eDr);
  const double s13 = w.lora.scale13, s2 = w.lora.scale2;
  kernels::ExpertsWeights whole{wide(w.w1_eFD), wide(w.w3_eFD), wide(w.w2_eDF),
                                wide(w.b1_eF),  wide(w.b3_eF),  wide(w.b2_eD)};
  if (a13.defined()) {
    whole.w1_eFD = whole.w1_eFD + s13 * b13.select(1, 0).bmm(a13);
    whole.w3_eFD = whole.w3_eFD + s13 * b13.select(1, 1).bmm(a13);
  }
  if (a2.defined()) whole.w2_eDF = whole.w2_eDF + s2 * b2.bmm(a2);
  kernels::ExpertsInput in = p.input;
  in.x = wide(in.x), in.scores_R = wide(in.scores_R);
  auto out = kernels::experts_forward(config, whole, in);
  const auto d = kernels::experts_backward(config, whole, std::move(out.saved), wide(p.dy));
  LoraResults r{out.y, d.x, d.scores_R, {}};
  if (a13.defined()) {
    const at::Tensor dw = s13 * at::cat({d.weights.w1_eFD, d.weights.w3_eFD}, 1);
    r.lora.b13_e2Fr = dw.bmm(a13.transpose(1, 2)).view_as(b13);
    r.lora.a13_erD = b13.flatten(1, 2).transpose(1, 2).bmm(dw);
  }
  if (a2.defined()) {
    r.lora.b2_eDr = s2 * d.weights.w2_eDF.bmm(a2.transpose(1, 2));
    r.lora.a2_erF = s2 * b2.transpose(1, 2).bmm(d.weights.w2_eDF);
  }
  return r;
}

// The largest error of an expert (2-norm): that of a small one would not show in the whole. Zeros
// are to be zeros.
double worst_error(const at::Tensor& got, const at::Tensor& want, bool by_expert) {
  if (want.numel() == 0) return 0;
  const std::int64_t parts = by_expert ? want.size(0) : 1;
  const at::Tensor a = got.to(at::kDouble).reshape({parts, -1}), b = want.reshape({parts, -1});
  const at::Tensor norm = b.norm(2, {1}), error = (a - b).norm(2, {1});
  return at::where(norm > 0, error / norm, at::where(error == 0, error, error + 1))
      .max()
      .item<double>();
}

void expect_lora(const LoraCase& c, const LoraOptions& o) {
  const auto name = detail::concat(
      "T ", c.T, " D ", c.D, " F ", c.F, " E ", c.E, " K ", c.K, ", ranks ", c.rank13, " ", c.rank2,
      ", load ", static_cast<int>(c.load), ", scores ", static_cast<int>(o.config.scores),
      o.config.activation == kernels::Activation::swiglu ? "" : ", clamped",
      o.biases ? ", biases" : "", o.indexed ? ", indexed" : "");
  SCOPED_TRACE(name);
  const LoraProblem p = problem_of(c, o);
  const LoraResults want = merged(p, o.config);
  const kernels::UseGpuKernels use(kernels::GpuKernels::own);
  const LoraResults got = with_lora(p, o.config, false), again = with_lora(p, o.config, true);
  EXPECT_FALSE(got.has_others || again.has_others);
  // Where g is cut off, its gradient jumps: rounding may move a number over that edge.
  const bool jumps = o.config.activation != kernels::Activation::swiglu;
  const auto of_got = got.listed(), of_want = want.listed(), of_again = again.listed();
  double worst = 0;
  for (size_t i = 0; i < of_want.size(); ++i) {
    const auto& [what, expected] = of_want[i];
    ASSERT_EQ(of_got[i].second.defined(), expected.defined()) << what;
    if (!expected.defined()) continue;
    const double error = worst_error(of_got[i].second, expected, i >= 3 && !jumps);
    EXPECT_LE(error, jumps ? 3e-2 : 1e-2) << what;  // not for a NaN
    EXPECT_TRUE(of_again[i].second.equal(of_got[i].second)) << what << ": not the same bits";
    worst = std::max(worst, error);
  }
  std::printf("%s: %.1e\n", name.c_str(), worst);
}

TEST(MoeOnGpu, LoraIsThatOfMergedWeights) {
  at::manual_seed(11);
  using enum kernels::ScoreSide;
  using enum kernels::Activation;
  const LoraOptions usual{{swiglu, after}, false, true};
  for (const LoraCase& c : std::vector<LoraCase>{{300, 136, 72, 16, 4, 8, 8},
                                                 {701, 264, 520, 5, 2, 16, 16},
                                                 {1500, 72, 136, 3, 1, 24, 24, Load::one},
                                                 {257, 1032, 584, 8, 2, 64, 8, Load::even},
                                                 {90, 520, 264, 70, 3, 16, 64},
                                                 {2500, 512, 1088, 40, 6, 16, 16},
                                                 {4100, 128, 64, 2, 2, 40, 32, Load::one},
                                                 {33, 8, 8, 4, 2, 8, 16},
                                                 {129, 256, 128, 4, 2, 16, 0},
                                                 {129, 256, 128, 4, 2, 0, 16},
                                                 {0, 64, 64, 4, 2, 16, 16}})
    for (const bool indexed : {true, false}) expect_lora(c, {usual.config, false, indexed});
  for (const auto side : {none, before, after})
    for (const auto activation : {swiglu, clamped_swiglu})
      for (const bool biases : {false, true})
        expect_lora({450, 264, 200, 6, 2, 16, 24}, {{activation, side}, biases, true});
}

}  // namespace
}  // namespace moesh
