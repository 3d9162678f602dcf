// The MoE layer with its router on one GPU, forward and backward, in bfloat16: moesh's own kernels
// (each call as it comes, and as a CUDA graph) beside LibTorch's grouped GEMM (kernels.gpu =
// library), the own kernels in float8 and a dense 8192^3 product, all in one run. Results are
// compared with float64 before anything is timed. The kernels one by one: bench_moe_layer_gpu.
//   bench_moe_gpu [seconds per measurement, 1] [shapes, 1234] [lora=rank]
//   bench_moe_gpu 1 12 4096,5120,1536,160,6   two of the four, and T,D,F,E,K of your own
//   bench_moe_gpu 1 12 lora=16                instead, what LoRA of rank 16 on the experts costs:
//     forward and gradient of the input of frozen experts, and with LoRA its own gradients as well
//   burst   runs 3 to 8 after a rest, at the boost clock
//   steady  the second half of a time without pause, at the power limit: training lives there
// TFLOP/s of 18 T K D F, whatever is executed. kept: alive after forward besides x, weights and y;
// peak: the most at once besides x and weights, gradients of the weights included.
// T tokens, D model, F ffn, E experts, K top-k, R rows at their experts

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <thread>

#include "bench/routing.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/kernels/experts.h"
#include "moesh/kernels/gpu_kernels.h"
#include "moesh/kernels/routing.h"
#include "moesh/nn/router.h"
#include "tests/gpu/torch_cuda.h"

namespace moesh::bench {
namespace {

using enum Place;
using kernels::GpuKernels;

const at::Device kDevice("cuda:0");

struct Shape {
  const char* name;
  std::int64_t T, D, F, E, K;
  double flops() const { return 18.0 * static_cast<double>(T * K) * static_cast<double>(D * F); }
};
constexpr Shape kShapes[] = {{"s1", 16384, 2048, 1408, 64, 6},
                             {"s2", 8192, 4096, 1536, 128, 8},
                             {"s3", 32768, 2048, 768, 128, 8},
                             {"s4", 16384, 7168, 2048, 32, 8}};

/// "4096,5120,1536,160,6".
Shape shape_of(const std::string& text) {
  Shape s{"own", 0, 0, 0, 0, 0};
  char rest = 0;
  const int num_read =
      std::sscanf(text.c_str(), "%ld,%ld,%ld,%ld,%ld%c", &s.T, &s.D, &s.F, &s.E, &s.K, &rest);
  MOESH_CHECK(num_read == 5 && s.T > 0 && s.D > 0 && s.F > 0 && s.K > 0 && s.K <= s.E,
              ErrorKind::config, "bench_moe_gpu: the shape '", text,
              "'; pass T,D,F,E,K such as 4096,5120,1536,160,6, with K of at most E");
  return s;
}

enum class Routing { random, balanced, zipf, empty, collapsed };
const char* to_string(Routing r) {
  switch (r) {
    case Routing::random: return "random";
    case Routing::balanced: return "balanced";
    case Routing::zipf: return "Zipf 1.0";
    case Routing::empty: return "one expert empty";
    case Routing::collapsed: return "collapsed";
  }
  return "";
}

at::Tensor choices(const Shape& s, Routing routing) {
  if (routing == Routing::balanced) return balanced(s.T, s.K, s.E, kDevice);
  if (routing == Routing::collapsed) return collapsed(s.T, s.K, kDevice);
  const auto floats = at::TensorOptions(kDevice).dtype(at::kFloat);
  at::Tensor loads = at::ones({s.E}, floats);
  if (routing == Routing::zipf) loads = at::arange(1, s.E + 1, floats).reciprocal();
  if (routing == Routing::empty) loads[1] = 1e-30;
  return drawn(s.T, s.K, loads);
}

/// The choice is given; scores, weights and their gradients are the router's.
struct ForcedChoice : nn::Probe {
  at::Tensor experts_TK;
  at::Tensor on_choice(const nn::Choice&) override { return experts_TK; }
};

struct Results {
  at::Tensor y_TD, x_TD, gate_ED;
  kernels::ExpertsWeights weights;
};

class Layer {
 public:
  Layer(const Mesh& mesh, const Shape& s, Routing routing)
      : shape(s),
        tokens_(mesh, 1, s.T, true),
        router_({.num_experts = s.E, .top_k = s.K, .normalize = true}, "gate", s.D,
                {.dtype = at::kBFloat16,
                 .device = kDevice,
                 .init = {.kind = Init::Distribution::normal,
                          .scale = 1 / std::sqrt(static_cast<double>(s.D))}}) {
    const auto normal = [&](at::IntArrayRef sizes, std::int64_t width) {
      return at::randn(sizes, at::TensorOptions(kDevice).dtype(at::kBFloat16))
          .div_(std::sqrt(static_cast<double>(width)));
    };
    x = normal({s.T, s.D}, 1).requires_grad_(true), dy = normal({s.T, s.D}, 1);
    weights = {normal({s.E, s.F, s.D}, s.D), normal({s.E, s.F, s.D}, s.D),
               normal({s.E, s.D, s.F}, s.F)};
    given.experts_TK = choices(s, routing);
  }

  /// Forward; `backward` makes the gradients of it.
  void forward() {
    route_ = router_.choose(assume<Dense{T, T, T}>(x), tokens_, {.probe = &given});
    sorted_ = kernels::sort_by_expert(local(route_.experts_NK), shape.E);
    const at::Tensor weights_N = local(route_.weights_NK).detach().flatten();
    auto out =
        kernels::experts_forward(config, weights,
                                 {.x = x.detach(),
                                  .ends_e = sorted_.ends_e,
                                  .scores_R = kernels::gather_rows(weights_N, sorted_.order_R),
                                  .token_R = sorted_.token_R,
                                  .inverse_TK = sorted_.inverse_TK});
    y = out.y, saved_ = std::move(out.saved);
  }
  Results backward() {
    auto d = kernels::experts_backward(config, weights, std::move(saved_), dy);
    saved_ = {};
    const at::Tensor& weights_NK = local(route_.weights_NK);
    const at::Tensor d_weights =
        kernels::gather_rows(d.scores_R, sorted_.inverse_TK.flatten()).view_as(weights_NK);
    const auto of_router = torch::autograd::grad({weights_NK}, {x, gate()}, {d_weights});
    route_ = {}, sorted_ = {};
    return {std::exchange(y, {}), d.x.add_(of_router[0]), of_router[1], std::move(d.weights)};
  }
  Results run() {
    forward();
    return backward();
  }
  const at::Tensor& gate() { return router_.gate().stored().value; }

  Shape shape;
  at::Tensor x, dy, y;
  kernels::ExpertsWeights weights;
  ForcedChoice given;
  kernels::ExpertsConfig config{.scores = kernels::ScoreSide::after};

 private:
  nn::Tokens tokens_;
  nn::Router router_;
  nn::Route route_;
  kernels::Sorted sorted_;
  kernels::ExpertsSaved saved_;
};

at::Tensor wide(const at::Tensor& t) { return t.detach().to(at::kDouble); }

double error_of(const at::Tensor& got, const at::Tensor& want) {
  const double norm = want.norm().item<double>();
  return (wide(got) - want).norm().item<double>() / std::max(norm, 1e-6);
}

/// The largest relative error (2-norm) of all results against float64, the weights of each expert
/// apart.
double largest_error(Layer& l) {
  const Results got = l.run();
  const Shape& s = l.shape;
  const at::Tensor x = wide(l.x), dy = wide(l.dy), gate = wide(l.gate());
  const at::Tensor logits = x.mm(gate.t()).requires_grad_(true);
  const at::Tensor chosen = logits.sigmoid().gather(1, l.given.experts_TK);
  const at::Tensor scores_TK = chosen / (chosen.sum(1, true) + 1e-20);
  const at::Tensor y = at::zeros_like(x), dx = at::zeros_like(x);
  const at::Tensor d_scores = at::zeros({s.T, s.K}, x.options());
  double worst = 0;
  for (std::int64_t e = 0; e < s.E; ++e) {
    const auto where = l.given.experts_TK.eq(e).nonzero();
    const at::Tensor token = where.select(1, 0), k = where.select(1, 1);
    const at::Tensor score = scores_TK.detach().index({token, k}).unsqueeze(1);
    const at::Tensor w1 = wide(l.weights.w1_eFD[e]), w3 = wide(l.weights.w3_eFD[e]),
                     w2 = wide(l.weights.w2_eDF[e]);
    const at::Tensor rows = x.index_select(0, token), d_rows = dy.index_select(0, token);
    const at::Tensor g = rows.mm(w1.t()), u = rows.mm(w3.t()), sigma = g.sigmoid();
    const at::Tensor silu = g * sigma, h = silu * u, p = d_rows.mm(w2);
    const at::Tensor du = score * p * silu, dg = score * p * u * (sigma + silu * (1 - sigma));
    y.index_add_(0, token, (score * h).mm(w2.t()));
    dx.index_add_(0, token, dg.mm(w1) + du.mm(w3));
    d_scores.index_put_({token, k}, (h * p).sum(1));
    worst = std::max({worst, error_of(got.weights.w1_eFD[e], dg.t().mm(rows)),
                      error_of(got.weights.w3_eFD[e], du.t().mm(rows)),
                      error_of(got.weights.w2_eDF[e], d_rows.t().mm(score * h))});
  }
  const at::Tensor d_logits = torch::autograd::grad({scores_TK}, {logits}, {d_scores})[0];
  return std::max({worst, error_of(got.y_TD, y), error_of(got.x_TD, dx + d_logits.mm(gate)),
                   error_of(got.gate_ED, d_logits.t().mm(x))});
}

struct Times {
  double burst, steady;  // ms
};

double median(std::vector<float> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

Times measure(double seconds, const std::function<void()>& run) {
  c10::impl::VirtualGuardImpl(kDevice.type()).synchronizeDevice(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  std::vector<float> all;
  for (double sum = 0; sum < seconds * 1e3 || all.size() < 10;) {
    all.push_back(gpu::milliseconds(run));
    sum += all.back();
  }
  return {median({all.begin() + 2, all.begin() + 8}),
          median({all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2), all.end()})};
}

struct Memory {
  double kept, peak;  // GiB
};

std::int64_t bytes(const at::Tensor& t) { return static_cast<std::int64_t>(t.nbytes()); }

Memory memory_of(Layer& l) {
  auto* allocator = c10::getDeviceAllocator(kDevice.type());
  const auto allocated = [&] { return allocator->getDeviceStats(0).allocated_bytes[0]; };
  constexpr double kGiB = 1 << 30;
  const std::int64_t before = allocated().current;
  allocator->resetPeakStats(0);
  l.forward();
  const std::int64_t kept = allocated().current - before - bytes(l.y);
  l.backward();
  return {static_cast<double>(kept) / kGiB, static_cast<double>(allocated().peak - before) / kGiB};
}

class Table {
 public:
  explicit Table(double seconds) : seconds_(seconds) {
    const auto options = at::TensorOptions(kDevice).dtype(at::kBFloat16);
    const at::Tensor a = at::randn({8192, 8192}, options), b = at::randn({8192, 8192}, options);
    at::Tensor c = at::empty_like(a);
    for (int i = 0; i < 3; ++i) at::mm_out(c, a, b);
    const Times t = measure(seconds, [&] { at::mm_out(c, a, b); });
    const double flops = 2.0 * 8192 * 8192 * 8192;
    dense_ = {flops / t.burst * 1e-9, flops / t.steady * 1e-9};
    std::printf("dense 8192^3: %.0f / %.0f TFLOP/s, burst / steady\n\n", dense_.burst,
                dense_.steady);
    std::printf(
        "| shape (T, D, F, E, K) | routing | kernels | ms | TFLOP/s | of dense | kept GiB "
        "| peak GiB | error |\n|---|---|---|---|---|---|---|---|---|\n");
  }

  void add(Layer& l, Routing routing, GpuKernels kernels, bool as_graph) {
    const kernels::UseGpuKernels use(kernels);
    const double error = largest_error(l);
    const Memory memory = memory_of(l);
    std::optional<gpu::Graph> graph;
    if (as_graph) graph.emplace([&] { l.run(); });
    const Times t = measure(seconds_, [&] { as_graph ? graph->replay() : (void)l.run(); });
    const Shape& s = l.shape;
    const double burst = s.flops() / t.burst * 1e-9, steady = s.flops() / t.steady * 1e-9;
    std::printf(
        "| %s (%ld, %ld, %ld, %ld, %ld) | %s | %s | %.2f / %.2f | %.0f / %.0f | %.2f / "
        "%.2f | %.2f | %.2f | %.1e |\n",
        s.name, s.T, s.D, s.F, s.E, s.K, to_string(routing),
        kernels == GpuKernels::library ? "_grouped_mm"
        : l.config.float8_tile > 0     ? "float8, graph"
        : as_graph                     ? "own, graph"
                                       : "own",
        t.burst, t.steady, burst, steady, burst / dense_.burst, steady / dense_.steady, memory.kept,
        memory.peak, error);
    std::fflush(stdout);
    const double most = l.config.float8_tile > 0 ? 0.1 : 2e-2;  // codes have four bits
    MOESH_CHECK(error < most, ErrorKind::internal, "error ", error, " is over ", most);
  }

 private:
  double seconds_;
  Times dense_;  // TFLOP/s
};

/// Frozen experts, without a router, and LoRA on them.
class FrozenExperts {
 public:
  FrozenExperts(const Mesh& mesh, const Shape& s, std::int64_t rank)
      : layer_(mesh, s, Routing::random) {
    const auto normal = [](at::IntArrayRef sizes, std::int64_t width) {
      return at::randn(sizes, at::TensorOptions(kDevice).dtype(at::kBFloat16))
          .div_(std::sqrt(static_cast<double>(width)));
    };
    lora_ = {normal({s.E, rank, s.D}, s.D),
             normal({s.E, 2, s.F, rank}, rank),
             normal({s.E, rank, s.F}, s.F),
             normal({s.E, s.D, rank}, rank),
             0.5,
             0.5};
    const auto sorted = kernels::sort_by_expert(layer_.given.experts_TK, s.E);
    input_ = {.x = layer_.x.detach(),
              .ends_e = sorted.ends_e,
              .scores_R = at::rand({s.T * s.K}, at::TensorOptions(kDevice)),
              .token_R = sorted.token_R,
              .inverse_TK = sorted.inverse_TK};
  }
  /// y, and the gradients of x and, with LoRA, of its matrices.
  std::vector<at::Tensor> run(bool with_lora) {
    // Without LoRA no one asks for the gradients of the weights.
    const kernels::ExpertsConfig config{.scores = kernels::ScoreSide::after,
                                        .weights_later = !with_lora};
    kernels::ExpertsWeights w = layer_.weights;
    if (with_lora) w.lora = lora_;
    auto out = kernels::experts_forward(config, w, input_);
    const auto d = kernels::experts_backward(config, w, std::move(out.saved), layer_.dy);
    const kernels::ExpertsLora& l = d.weights.lora;
    return {out.y, d.x, l.a13_erD, l.b13_e2Fr, l.a2_erF, l.b2_eDr};
  }

 private:
  Layer layer_;
  kernels::ExpertsLora lora_;
  kernels::ExpertsInput input_;
};

void run_lora(double seconds, const Mesh& mesh, const std::vector<Shape>& shapes,
              std::int64_t rank) {
  std::printf(
      "forward and gradient of the input, LoRA of rank %ld on all experts; ms, burst / steady\n\n"
      "| shape (T, D, F, E, K) | kernels | without | with LoRA | costs %% | apart |\n"
      "|---|---|---|---|---|---|\n",
      rank);
  for (const Shape& s : shapes) {
    FrozenExperts experts(mesh, s, rank);
    std::vector<at::Tensor> of_library;
    for (const auto kernels : {GpuKernels::library, GpuKernels::own}) {
      const kernels::UseGpuKernels use(kernels);
      auto results = experts.run(true);
      double apart = 0;  // from what LibTorch's operations give
      if (of_library.empty()) of_library = results;
      for (size_t i = 0; i < results.size(); ++i)
        apart = std::max(apart, error_of(results[i], wide(of_library[i])));
      results.clear();
      // In turns, as the clock falls while the card is warm.
      Times without[2], with[2];
      for (int i = 0; i < 2; ++i) {
        without[i] = measure(seconds / 2, [&] { experts.run(false); });
        with[i] = measure(seconds / 2, [&] { experts.run(true); });
      }
      const auto mean = [](const Times(&t)[2]) {
        return Times{(t[0].burst + t[1].burst) / 2, (t[0].steady + t[1].steady) / 2};
      };
      const Times a = mean(without), b = mean(with);
      std::printf(
          "| %s (%ld, %ld, %ld, %ld, %ld) | %s | %.3f / %.3f | %.3f / %.3f | %.1f / %.1f | %.1e "
          "|\n",
          s.name, s.T, s.D, s.F, s.E, s.K, kernels == GpuKernels::own ? "own" : "_grouped_mm",
          a.burst, a.steady, b.burst, b.steady, 100 * (b.burst / a.burst - 1),
          100 * (b.steady / a.steady - 1), apart);
      std::fflush(stdout);
      MOESH_CHECK(apart < 3e-2, ErrorKind::internal, "the results are ", apart,
                  " apart, more than 3e-2");
    }
  }
}

/// lora_rank 0: the layer itself.
void run(double seconds, const std::vector<Shape>& shapes, std::int64_t lora_rank) {
  at::manual_seed(1);
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  if (lora_rank > 0) return run_lora(seconds, mesh, shapes, lora_rank);
  Table table(seconds);
  for (const Shape& shape : shapes)
    for (const auto routing :
         {Routing::random, Routing::balanced, Routing::zipf, Routing::empty, Routing::collapsed}) {
      Layer layer(mesh, shape, routing);
      table.add(layer, routing, GpuKernels::own, false);
      layer.config.float8_tile = 128;
      table.add(layer, routing, GpuKernels::own, true);
      layer.config.float8_tile = 0;
      if (routing != Routing::random) continue;
      table.add(layer, routing, GpuKernels::own, true);
      table.add(layer, routing, GpuKernels::library, false);
    }
}

}  // namespace
}  // namespace moesh::bench

int main(int argc, char** argv) try {
  using namespace moesh::bench;
  const double seconds = argc > 1 ? std::stod(argv[1]) : 1;
  MOESH_CHECK(seconds > 0, moesh::ErrorKind::config, "bench_moe_gpu: ", seconds,
              " seconds per measurement; pass a positive number");
  std::vector<Shape> shapes;
  std::int64_t lora_rank = 0;
  for (int i = 2; i < argc; ++i) {
    const std::string text = argv[i];
    if (text.starts_with("lora=")) {
      lora_rank = std::atol(text.c_str() + 5);
      MOESH_CHECK(lora_rank > 0, moesh::ErrorKind::config, "bench_moe_gpu: '", text,
                  "'; pass a rank of 1 or more, such as lora=16");
    } else if (text.find_first_not_of("1234") != std::string::npos)
      shapes.push_back(shape_of(text));
    else
      for (const char c : text) shapes.push_back(kShapes[c - '1']);
  }
  if (shapes.empty()) shapes.assign(std::begin(kShapes), std::end(kShapes));
  moesh::comm::LaunchOptions options;
  options.device = kDevice;
  moesh::comm::launch(1, [&](moesh::comm::Group&) { run(seconds, shapes, lora_rank); }, options);
} catch (const std::exception& e) {
  std::fprintf(stderr, "bench_moe_gpu: %s\n", e.what());
  return 1;
}
