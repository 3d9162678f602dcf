// The routed experts of one rank, forward and backward, against the same layer made of plain ops
// (argsort, index, one matmul per expert, silu, index_add) and against that with _grouped_mm
// instead of the loop, both with LibTorch's autograd. The choice of experts and its scores are
// given: the router is the same for all and is left out. Results are checked against float64 before
// anything is timed. A dense 2048^3 matmul of the same dtype is timed in between.
//   moe_layer [--device cpu|cuda] [--dtype float|bfloat16] [--repeat n] [--threads n]
//             [--clock wall|cpu] [--memory keep|fresh]
//             [--shape T,D,F,E,K]
// On the CPU the process keeps the memory it frees, for all three alike; `--memory fresh` adds the
// cost of getting it from the kernel. Extra memory is the peak of live bytes over what is live at
// the end (inputs, weights, y and all gradients). T tokens, D model, F ffn, E experts, K top-k

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/kernels/experts.h"
#include "moesh/kernels/memory.h"
#include "moesh/kernels/routing.h"
#include "tests/counting_allocator.h"

namespace moesh::bench {
namespace {

using kernels::ExpertsWeights;

class Memory {
 public:
  explicit Memory(at::Device device) : device_(device) {}
  void reset() const {
    if (device_.is_cpu())
      CountingAllocator::reset_peak();
    else
      c10::getDeviceAllocator(device_.type())->resetPeakStats(0);
  }
  /// Peak since reset over what is live now.
  std::int64_t extra() const {
    if (device_.is_cpu()) return CountingAllocator::peak - CountingAllocator::live;
    const auto stats =
        c10::getDeviceAllocator(device_.type())->getDeviceStats(0).allocated_bytes[0];
    return stats.peak - stats.current;
  }

 private:
  at::Device device_;
};

struct Shape {
  std::int64_t T, D, F, E, K;
  double flops() const { return 18.0 * static_cast<double>(T * K) * static_cast<double>(D * F); }
};

struct Problem {
  Shape shape;
  at::Tensor x_TD, scores_TK, experts_TK, dy_TD;
  at::Tensor w1_EFD, w3_EFD, w2_EDF;

  Problem(const Shape& s, at::ScalarType dtype, at::Device device) : shape(s) {
    at::manual_seed(1);
    const auto normal = [&](at::IntArrayRef sizes, double scale) {
      return (at::randn(sizes) * scale).to(dtype).to(device);
    };
    x_TD = normal({s.T, s.D}, 1), dy_TD = normal({s.T, s.D}, 1);
    w1_EFD = normal({s.E, s.F, s.D}, 1 / std::sqrt(s.D)),
    w3_EFD = normal({s.E, s.F, s.D}, 1 / std::sqrt(s.D));
    w2_EDF = normal({s.E, s.D, s.F}, 1 / std::sqrt(s.F));
    const auto [scores, experts] = at::topk(at::softmax(at::randn({s.T, s.E}), 1), s.K, 1);
    scores_TK = scores.to(device), experts_TK = experts.to(device);
  }
  std::vector<at::Tensor> inputs() const { return {x_TD, scores_TK, w1_EFD, w3_EFD, w2_EDF}; }
};

/// y, then the gradients of x, scores, w1, w3, w2.
using Results = std::vector<at::Tensor>;
using Layer = std::function<Results(const Problem&)>;

Results ours(const Problem& p) {
  using namespace kernels;
  const Sorted s = sort_by_expert(p.experts_TK, p.shape.E);
  const ExpertsConfig config{.scores = ScoreSide::after};
  const ExpertsWeights weights{p.w1_EFD, p.w3_EFD, p.w2_EDF};
  const auto out = experts_forward(config, weights,
                                   {.x = p.x_TD,
                                    .ends_e = s.ends_e,
                                    .scores_R = gather_rows(p.scores_TK.flatten(), s.order_R),
                                    .token_R = s.token_R,
                                    .inverse_TK = s.inverse_TK});
  const auto g = experts_backward(config, weights, out.saved, p.dy_TD);
  const at::Tensor d_scores = gather_rows(g.scores_R, s.inverse_TK.flatten()).view_as(p.scores_TK);
  return {out.y, g.x, d_scores, g.weights.w1_eFD, g.weights.w3_eFD, g.weights.w2_eDF};
}

/// `rows_to_rows` maps (rows_RD, counts, w1, w3, w2) to the outputs of the experts, unweighted.
template <class F>
Results with_autograd(const Problem& p, const F& rows_to_rows) {
  std::vector<at::Tensor> leaves;
  for (const auto& t : p.inputs()) leaves.push_back(t.detach().requires_grad_());
  const at::Tensor order_N = at::argsort(p.experts_TK.flatten(), /*stable=*/true, 0, false),
                   token_N = order_N.div(p.shape.K, "floor");
  const at::Tensor counts_E = at::bincount(p.experts_TK.flatten(), {}, p.shape.E);
  const at::Tensor rows_ND = leaves[0].index_select(0, token_N),
                   scores_N1 = leaves[1].flatten().index_select(0, order_N).unsqueeze(1);
  const at::Tensor out_ND = rows_to_rows(rows_ND, counts_E, leaves[2], leaves[3], leaves[4]) *
                            scores_N1.to(rows_ND.scalar_type());
  const at::Tensor y = at::zeros_like(p.x_TD).index_add(0, token_N, out_ND);
  Results results{y.detach()};
  for (auto& g : torch::autograd::grad({y}, leaves, {p.dy_TD})) results.push_back(g);
  return results;
}

Results plain_ops(const Problem& p) {
  return with_autograd(p, [](const at::Tensor& rows_ND, const at::Tensor& counts_E,
                             const at::Tensor& w1, const at::Tensor& w3, const at::Tensor& w2) {
    const at::Tensor counts = counts_E.cpu();
    const at::IntArrayRef sizes(counts.const_data_ptr<std::int64_t>(), counts.numel());
    const auto rows = rows_ND.split_with_sizes(sizes), w1s = w1.unbind(), w3s = w3.unbind(),
               w2s = w2.unbind();
    std::vector<at::Tensor> out;
    for (size_t e = 0; e < rows.size(); ++e) {
      out.push_back((at::silu(rows[e].mm(w1s[e].t())) * rows[e].mm(w3s[e].t())).mm(w2s[e].t()));
    }
    return at::cat(out);
  });
}

Results grouped_mm(const Problem& p) {
  return with_autograd(p, [](const at::Tensor& rows_ND, const at::Tensor& counts_E,
                             const at::Tensor& w1, const at::Tensor& w3, const at::Tensor& w2) {
    const at::Tensor ends = counts_E.cumsum(0).to(at::kInt);
    const auto times = [&](const at::Tensor& rows, const at::Tensor& w) {
      return at::_grouped_mm(rows, w.transpose(1, 2), ends);
    };
    return times(at::silu(times(rows_ND, w1)) * times(rows_ND, w3), w2);
  });
}

/// The same by whole-tensor ops in float64, in slices of experts so that it fits.
Results exact(const Problem& p) {
  Problem wide = p;
  for (at::Tensor* t :
       {&wide.x_TD, &wide.scores_TK, &wide.dy_TD, &wide.w1_EFD, &wide.w3_EFD, &wide.w2_EDF})
    *t = t->to(at::kDouble);
  return plain_ops(wide);
}

/// The largest relative error (2-norm) over the results.
double error_of(const Results& got, const Results& want) {
  double worst = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const at::Tensor difference = got[i].to(at::kDouble) - want[i];
    worst = std::max(worst, (difference.norm() / want[i].norm()).item<double>());
  }
  return worst;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

struct Options {
  at::Device device = at::kCPU;
  std::vector<at::ScalarType> dtypes{at::kFloat, at::kBFloat16};
  int repeat = 0;
  int profile = 0;         // this many calls of only the layer, and no baseline
  bool cpu_clock = false;  // processor time, for one thread on a busy machine
  std::vector<Shape> shapes;
};

struct Entry {
  const char* name;
  Layer layer;
  std::vector<double> seconds{};
  std::int64_t extra = 0;
  double error = 0;
  bool works = true;
};

class Bench {
 public:
  explicit Bench(Options options) : options_(std::move(options)), memory_(options_.device) {}

  void run() {
    for (const auto dtype : options_.dtypes) {
      std::printf("\n%s on %s, %d threads\n", c10::toString(dtype), options_.device.str().c_str(),
                  at::get_num_threads());
      std::printf("%-28s %-11s %10s %9s %9s %7s %10s %9s\n", "(T, D, F, E, K)", "layer", "ms",
                  "GFLOP/s", "of dense", "ratio", "extra MiB", "error");
      for (const auto& shape : options_.shapes) measure(shape, dtype);
    }
  }

 private:
  double timed(const std::function<void()>& f) const {
    synchronize();
    const double start = now();
    f();
    synchronize();
    return now() - start;
  }

  double now() const {
    if (options_.cpu_clock) return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  void synchronize() const {
    if (!options_.device.is_cpu())
      c10::impl::VirtualGuardImpl(options_.device.type()).synchronizeDevice(0);
  }

  void measure(const Shape& shape, at::ScalarType dtype) {
    const Problem p(shape, dtype, options_.device);
    if (options_.profile) {  // nothing but the layer, for perf
      for (int i = 0; i < options_.profile; ++i) ours(p);
      return;
    }
    std::vector<Entry> entries{
        {"moesh", ours}, {"plain ops", plain_ops}, {"_grouped_mm", grouped_mm}};
    check(p, entries, dtype == at::kFloat ? 1e-5 : 2e-2);
    const at::Tensor a = at::randn({2048, 2048}).to(dtype).to(options_.device),
                     b = at::randn({2048, 2048}).to(dtype).to(options_.device);
    at::Tensor c = at::empty_like(a);
    std::vector<double> dense;
    const int repeat = options_.repeat ? options_.repeat
                                       : std::clamp(static_cast<int>(4e11 / shape.flops()), 7, 41);
    for (int i = 0; i < repeat; ++i) {  // in turns, so that all see the same machine
      for (auto& entry : entries) {
        if (!entry.works) continue;
        Results kept;
        memory_.reset();
        entry.seconds.push_back(timed([&] { kept = entry.layer(p); }));
        entry.extra = std::max(entry.extra, memory_.extra());
      }
      dense.push_back(timed([&] { at::mm_out(c, a, b); }));
    }
    report(shape, entries, 2.0 * 2048 * 2048 * 2048 / median(dense));
  }

  static void check(const Problem& p, std::vector<Entry>& entries, double tolerance) {
    const Results want = exact(p);
    for (auto& entry : entries) {
      try {
        entry.error = error_of(entry.layer(p), want);
      } catch (const c10::Error& e) {
        MOESH_CHECK(entry.layer.target_type() != typeid(&ours), e.what());
        entry.works = false;  // a library that has no such op for this dtype
        continue;
      }
      MOESH_CHECK(entry.error <= tolerance || std::string(entry.name) != "moesh",
                  ErrorKind::internal, "error ", entry.error, " is over ", tolerance);
    }
  }

  static void report(const Shape& s, const std::vector<Entry>& entries, double dense) {
    char name[64];
    std::snprintf(name, sizeof(name), "(%ld, %ld, %ld, %ld, %ld)", s.T, s.D, s.F, s.E, s.K);
    double best = 1e30;
    std::int64_t least = 0;
    for (const auto& e : entries) {
      if (!e.works || std::string(e.name) == "moesh") continue;
      best = std::min(best, median(e.seconds));
      least = e.name == std::string("plain ops") ? e.extra : least;
    }
    for (const auto& e : entries) {
      if (!e.works) {
        std::printf("%-28s %-11s %10s\n", name, e.name, "not offered");
        continue;
      }
      const double time = median(e.seconds), speed = s.flops() / time;
      std::printf("%-28s %-11s %10.2f %9.1f %8.1f%% %7.2f %10.1f %9.1e\n", name, e.name, time * 1e3,
                  speed / 1e9, 100 * speed / dense, best / time,
                  static_cast<double>(e.extra) / (1 << 20), e.error);
    }
    const double ours = median(entries[0].seconds),
                 target = std::min(1.5 / best, 0.85 * dense / s.flops());
    std::printf(
        "%-28s dense %.1f GFLOP/s; moesh is at %.0f%% of the target speed, with %.2f of the extra "
        "memory of plain ops\n\n",
        name, dense / 1e9, 100 / (ours * target),
        static_cast<double>(entries[0].extra) /
            static_cast<double>(std::max<std::int64_t>(1, least)));
    std::fflush(stdout);
  }

  Options options_;
  Memory memory_;
};

Options parse(int argc, char** argv) {
  Options o;
  std::optional<std::string> dtype;
  bool keep = true;
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i];
    MOESH_CHECK(i + 1 < argc, ErrorKind::config, key, " needs a value");
    const std::string value = argv[i + 1];
    if (key == "--device") {
      o.device = at::Device(value);
    } else if (key == "--dtype") {
      dtype = value;
    } else if (key == "--repeat") {
      o.repeat = std::stoi(value);
    } else if (key == "--profile") {
      o.profile = std::stoi(value);
    } else if (key == "--clock") {
      MOESH_CHECK(value == "wall" || value == "cpu", ErrorKind::config, "--clock is ", value,
                  "; use wall or cpu");
      o.cpu_clock = value == "cpu";
    } else if (key == "--memory") {
      MOESH_CHECK(value == "keep" || value == "fresh", ErrorKind::config, "--memory is ", value,
                  "; use keep or fresh");
      keep = value == "keep";
    } else if (key == "--threads") {
      at::set_num_threads(std::stoi(value));
    } else if (key == "--shape") {
      Shape s{};
      MOESH_CHECK(
          std::sscanf(value.c_str(), "%ld,%ld,%ld,%ld,%ld", &s.T, &s.D, &s.F, &s.E, &s.K) == 5,
          ErrorKind::config, "--shape is ", value, "; write T,D,F,E,K");
      o.shapes.push_back(s);
    } else {
      MOESH_CHECK(
          false, ErrorKind::config, "unknown option ", key,
          "; there are --device, --dtype, --repeat, --profile, --threads, --clock, --memory "
          "and --shape");
    }
  }
  if (keep) kernels::keep_freed_memory();
  const bool cpu = o.device.is_cpu();
  if (!cpu) o.dtypes = {at::kBFloat16};
  if (dtype) {
    MOESH_CHECK(*dtype == "float" || *dtype == "bfloat16", ErrorKind::config, "--dtype is ", *dtype,
                "; use float or bfloat16");
    o.dtypes = {*dtype == "float" ? at::kFloat : at::kBFloat16};
  }
  if (o.shapes.empty() && cpu) {
    o.shapes = {{256, 256, 128, 32, 4},
                {512, 512, 256, 32, 4},
                {1024, 1024, 512, 64, 8},
                {2048, 512, 256, 32, 4},
                {8192, 256, 128, 64, 8}};
  } else if (o.shapes.empty()) {
    o.shapes = {{16384, 2048, 1408, 64, 6}, {8192, 4096, 1536, 128, 8}, {32768, 2048, 768, 128, 8}};
  }
  return o;
}

}  // namespace
}  // namespace moesh::bench

int main(int argc, char** argv) {
  try {
    moesh::CountingAllocator::install();
    moesh::bench::Bench(moesh::bench::parse(argc, argv)).run();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "moe_layer: %s\n", e.what());
    return 1;
  }
}
