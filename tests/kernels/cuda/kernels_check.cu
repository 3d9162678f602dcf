// Every kernel against a float64 reference which a slow and obvious kernel computes, from the same
// bf16 inputs: hard counts of rows, odd sizes, both activations, both sides of the score, biases.
// Outputs and workspaces are NaN before each run and lie between guard bands; each expert's error
// is taken apart (a wrong small expert hides in a norm). Then: the same bits twice and from a CUDA
// graph, rows that do not depend on the batch around them, and a NaN that stays where it is.
// usage: kernels_check [quick: a few small cases, for compute-sanitizer]; the exit code is the
// number of failures. Needs a GPU of compute capability 9.0. T tokens, D model, F ffn, E experts, K
// top-k, R rows at their experts

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "tests/kernels/cuda/device_layer.h"

namespace moesh::kernels::cuda {
namespace {

constexpr double kTolerance = 5e-3;
int failures = 0;

template <class Function>
__global__ void for_each(std::int64_t size, double* out, Function f) {
  for (std::int64_t i = blockIdx.x * 128ll + threadIdx.x; i < size; i += gridDim.x * 128ll)
    out[i] = f(i);
}
/// f(i) for i in [0, size), in float64.
template <class Function>
std::vector<double> reference(std::int64_t size, Function f) {
  if (size == 0) return {};
  Buffer<double> out(size);
  for_each<<<2048, 128>>>(size, out.get(), f);
  MOESH_RUN(cudaGetLastError());
  return out.host();
}
__device__ double wide(bf16 v) { return static_cast<double>(static_cast<float>(v)); }

std::vector<double> wide(const std::vector<bf16>& v) {
  std::vector<double> out(v.size());
  std::transform(v.begin(), v.end(), out.begin(),
                 [](bf16 x) { return static_cast<double>(static_cast<float>(x)); });
  return out;
}
std::vector<double> wide(const std::vector<float>& v) { return {v.begin(), v.end()}; }

/// The worst relative error among the groups [ends[i - 1], ends[i]) * width; what is zero must be.
double worst_error(const std::vector<double>& got, const std::vector<double>& want,
                   const std::vector<std::int64_t>& ends) {
  double worst = 0;
  std::int64_t i = 0;
  for (const std::int64_t end : ends) {
    double error = 0, norm = 0;
    for (; i < end; ++i) {
      const double d = got[i] - want[i];
      error += d * d, norm += want[i] * want[i];
    }
    if (std::isnan(error)) return NAN;
    if (norm == 0) {
      if (error != 0) return INFINITY;
    } else {
      worst = std::max(worst, std::sqrt(error / norm));
    }
  }
  return worst;
}

struct Report {
  std::string title;
  std::string line;
  bool good = true;
  void add(const char* name, double error, double tolerance = kTolerance) {
    char text[64];
    const bool ok = error <= tolerance;  // not for a NaN
    std::snprintf(text, sizeof text, " %s %.1e%s", name, error, ok ? "" : " WRONG");
    line += text, good &= ok;
  }
  void add(const char* name, bool ok) {
    if (!ok) line += std::string(" ") + name + " WRONG", good = false;
  }
  ~Report() {
    std::printf("%-44s %s%s\n", title.c_str(), good ? "ok" : "FAILED", line.c_str());
    std::fflush(stdout);
    failures += !good;
  }
};

/// The reference's view of a layer: raw pointers for device lambdas.
struct View {
  std::int64_t D, F;
  bool scores, before, clamped, biases;
  const bf16 *x, *dy, *w1, *w3, *w2, *b1, *b3, *b2;
  const int *token, *expert;  // [R]
  const float* score;
};
struct Activated {
  double h, dg, du, before, after;
};
__device__ Activated activate(const View& v, std::int64_t row, std::int64_t f, double gate,
                              double up) {
  const double s = v.scores ? v.score[row] : 1;
  Activated a = {};
  a.before = v.before ? s : 1, a.after = v.before ? 1 : s;
  const std::int64_t at = v.expert[row] * v.F + f;
  const double g = a.before * gate + (v.biases ? wide(v.b1[at]) : 0);
  const double u = a.before * up + (v.biases ? wide(v.b3[at]) : 0);
  if (v.clamped) {
    const double gc = fmin(g, 7.), uc = fmax(-7., fmin(u, 7.)) + 1,
                 sigma = 1 / (1 + exp(-1.702 * gc));
    a.h = uc * gc * sigma;
    a.dg = g > 7 ? 0 : uc * (sigma + 1.702 * gc * sigma * (1 - sigma));
    a.du = fabs(u) > 7 ? 0 : gc * sigma;
  } else {
    const double sigma = 1 / (1 + exp(-g));
    a.h = g * sigma * u, a.dg = u * (sigma + g * sigma * (1 - sigma)), a.du = g * sigma;
  }
  return a;
}

void check_sort(const DeviceLayer& l, Report& report, std::vector<std::int64_t>& ends,
                std::vector<int>& expert_R) {
  const auto experts = l.experts_TK.host();
  const auto weight = l.weight_TK.host();
  const auto got_ends = l.ends.host(), order = l.order.host(), token = l.token.host(),
             inverse = l.inverse.host();
  const auto score = l.score.host();
  std::int64_t row = 0;
  bool good = true;
  std::vector<std::int32_t> want_inverse(experts.size(), -1);
  for (std::int64_t e = 0; e < l.config.num_experts; ++e) {
    for (size_t i = 0; i < experts.size(); ++i) {
      if (experts[i] != e + l.config.first_expert) continue;
      good &= order[row] == static_cast<int>(i) &&
              token[row] == static_cast<int>(i / l.config.top_k) && score[row] == weight[i];
      want_inverse[i] = static_cast<int>(row++);
      expert_R.push_back(static_cast<int>(e));
    }
    good &= got_ends[e] == row;
    ends.push_back(row);
  }
  report.add("sort", good && want_inverse == inverse);
}

std::vector<std::int64_t> times(std::vector<std::int64_t> v, std::int64_t factor) {
  for (auto& i : v) i *= factor;
  return v;
}
std::vector<std::int64_t> multiples(std::int64_t n, std::int64_t factor) {
  std::vector<std::int64_t> v(n);
  for (std::int64_t i = 0; i < n; ++i) v[i] = (i + 1) * factor;
  return v;
}

/// Runs the layer and compares each kernel's output with the reference made from its inputs.
void check_layer(const std::string& title, DeviceLayer& l) {
  Report report{title, {}};
  const LayerConfig& c = l.config;
  const std::int64_t D = c.model, F = c.ffn, E = c.num_experts, K = c.top_k, T = c.tokens;
  l.poison();
  l.forward(nullptr);
  MOESH_RUN(cudaDeviceSynchronize());
  std::vector<std::int64_t> ends;
  std::vector<int> expert_R;
  check_sort(l, report, ends, expert_R);
  const std::int64_t R = ends.back();
  Buffer<int> expert(std::max<std::int64_t>(R, 1)), starts(E + 1);
  expert.copy_from(expert_R);
  std::vector<int> starts_host{0};
  for (auto end : ends) starts_host.push_back(static_cast<int>(end));
  starts.copy_from(starts_host);
  std::vector<int> rows(l.rows);
  std::iota(rows.begin(), rows.end(), 0);
  Buffer<int> same(std::max<std::int64_t>(l.rows, 1));
  same.copy_from(rows);
  const View v{D,
               F,
               c.scores,
               c.before,
               c.clamped,
               c.biases,
               l.x.get(),
               l.dy.get(),
               l.w1.get(),
               l.w3.get(),
               l.w2.get(),
               l.b1.get(),
               l.b3.get(),
               l.b2.get(),
               c.gathered ? l.token.get() : same.get(),
               expert.get(),
               l.score.get()};
  const int* first = starts.get();
  auto first_rows = [&](const Buffer<bf16>& b, std::int64_t width) {
    auto all = wide(b.host());
    all.resize(R * width);
    return all;
  };

  // forward
  const bf16 *gate = l.gate.get(), *up = l.up_.get(), *act = l.act.get(), *y_R = l.y_R.get();
  const int* inverse = l.inverse.get();
  for (const bf16* w : {v.w1, v.w3}) {
    report.add(w == v.w1 ? "gate" : "up",
               worst_error(first_rows(w == v.w1 ? l.gate : l.up_, F),
                           reference(R * F,
                                     [=] __device__(std::int64_t i) {
                                       const std::int64_t row = i / F, f = i % F;
                                       const bf16 *a = v.x + v.token[row] * D,
                                                  *b = w + (v.expert[row] * F + f) * D;
                                       double sum = 0;
                                       for (std::int64_t d = 0; d < D; ++d)
                                         sum += wide(a[d]) * wide(b[d]);
                                       return sum;
                                     }),
                           times(ends, F)));
  }
  auto hidden = [=] __device__(std::int64_t i) {
    const Activated a = activate(v, i / F, i % F, wide(gate[i]), wide(up[i]));
    return a.after * a.h;
  };
  const auto want_act = reference(R * F, hidden);
  report.add("act", worst_error(first_rows(l.act, F), want_act, times(ends, F)));
  report.add("y_R",
             worst_error(first_rows(l.y_R, D),
                         reference(R * D,
                                   [=] __device__(std::int64_t i) {
                                     const std::int64_t row = i / D, d = i % D,
                                                        at = v.expert[row] * D + d;
                                     const double s = v.scores && !v.before ? v.score[row] : 1;
                                     double sum = v.biases ? s * wide(v.b2[at]) : 0;
                                     for (std::int64_t f = 0; f < F; ++f)
                                       sum += wide(act[row * F + f]) * wide(v.w2[at * F + f]);
                                     return sum;
                                   }),
                         times(ends, D)));
  auto combined = [=](const bf16* from) {
    return reference(T * D, [=] __device__(std::int64_t i) {
      double sum = 0;
      for (std::int64_t k = 0; k < K; ++k) {
        const int row = inverse[i / D * K + k];
        if (row >= 0) sum += wide(from[row * D + i % D]);
      }
      return sum;
    });
  };
  report.add("y", worst_error(wide(l.y.host()), combined(y_R), {T * D}));

  // backward: dh writes over gate and up
  const Buffer<bf16> old_gate(l.gate.size()), old_up(l.up_.size());
  MOESH_RUN(cudaMemcpy(old_gate.get(), l.gate.get(), l.gate.bytes(), cudaMemcpyDeviceToDevice));
  MOESH_RUN(cudaMemcpy(old_up.get(), l.up_.get(), l.up_.bytes(), cudaMemcpyDeviceToDevice));
  l.act.poison();
  l.backward(nullptr);
  MOESH_RUN(cudaDeviceSynchronize());
  const bf16 *g0 = old_gate.get(), *u0 = old_up.get();
  Buffer<double> p_RF(std::max<std::int64_t>(R * F, 1));
  double* p = p_RF.get();
  reference(R * F, [=] __device__(std::int64_t i) {
    const std::int64_t row = i / F, f = i % F;
    double sum = 0;
    for (std::int64_t d = 0; d < D; ++d)
      sum += wide(v.dy[v.token[row] * D + d]) * wide(v.w2[(v.expert[row] * D + d) * F + f]);
    return p[i] = sum;
  });
  for (const bool of_gate : {true, false}) {
    report.add(of_gate ? "dg" : "du",
               worst_error(first_rows(of_gate ? l.gate : l.up_, F),
                           reference(R * F,
                                     [=] __device__(std::int64_t i) {
                                       const Activated a =
                                           activate(v, i / F, i % F, wide(g0[i]), wide(u0[i]));
                                       return a.before * a.after * p[i] * (of_gate ? a.dg : a.du);
                                     }),
                           times(ends, F)));
  }
  report.add("act'", worst_error(first_rows(l.act, F), want_act, times(ends, F)));
  if (c.scores) {
    auto got = wide(l.d_score.host());
    got.resize(R);
    report.add(
        "dS",
        worst_error(got,
                    reference(R,
                              [=] __device__(std::int64_t row) {
                                double sum = 0;
                                for (std::int64_t f = 0; f < F; ++f) {
                                  const std::int64_t i = row * F + f;
                                  const Activated a = activate(v, row, f, wide(g0[i]), wide(u0[i]));
                                  sum += v.before ? p[i] * (a.dg * wide(g0[i]) + a.du * wide(u0[i]))
                                                  : a.h * p[i];
                                }
                                for (std::int64_t d = 0; v.biases && !v.before && d < D; ++d)
                                  sum += wide(v.dy[v.token[row] * D + d]) *
                                         wide(v.b2[v.expert[row] * D + d]);
                                return sum;
                              }),
                    {R}),
        R < 16 ? 2e-2 : kTolerance);  // few dot products, which may cancel
  }
  report.add("dx_R", worst_error(first_rows(l.dx_R, D),
                                 reference(R * D,
                                           [=] __device__(std::int64_t i) {
                                             const std::int64_t row = i / D, d = i % D;
                                             double sum = 0;
                                             for (std::int64_t f = 0; f < F; ++f) {
                                               const std::int64_t at =
                                                   (v.expert[row] * F + f) * D + d;
                                               sum += wide(gate[row * F + f]) * wide(v.w1[at]) +
                                                      wide(up[row * F + f]) * wide(v.w3[at]);
                                             }
                                             return sum;
                                           }),
                                 times(ends, D)));
  report.add("dx", worst_error(wide(l.dx_.host()), combined(l.dx_R.get()), {T * D}));
  for (const bf16* d : {gate, up}) {
    report.add(d == gate ? "dw1" : "dw3",
               worst_error(
                   wide((d == gate ? l.dw1 : l.dw3).host()),
                   reference(E * F * D,
                             [=] __device__(std::int64_t i) {
                               const std::int64_t e = i / (F * D), f = i / D % F, column = i % D;
                               double sum = 0;
                               for (int row = first[e]; row < first[e + 1]; ++row)
                                 sum += wide(d[row * F + f]) * wide(v.x[v.token[row] * D + column]);
                               return sum;
                             }),
                   multiples(E, F * D)));
  }
  report.add("dw2", worst_error(wide(l.dw2_.host()),
                                reference(E * F * D,
                                          [=] __device__(std::int64_t i) {
                                            const std::int64_t e = i / (F * D), column = i / F % D,
                                                               f = i % F;
                                            double sum = 0;
                                            for (int row = first[e]; row < first[e + 1]; ++row)
                                              sum += wide(act[row * F + f]) *
                                                     wide(v.dy[v.token[row] * D + column]);
                                            return sum;
                                          }),
                                multiples(E, F * D)));
  if (c.biases) {
    for (const bf16* d : {gate, up}) {
      report.add(d == gate ? "db1" : "db3",
                 worst_error(wide((d == gate ? l.db1 : l.db3).host()),
                             reference(E * F,
                                       [=] __device__(std::int64_t i) {
                                         double sum = 0;
                                         for (int row = first[i / F]; row < first[i / F + 1];
                                              ++row) {
                                           const std::int64_t at = row * F + i % F;
                                           const Activated a =
                                               activate(v, row, i % F, wide(g0[at]), wide(u0[at]));
                                           sum += a.after * p[at] * (d == gate ? a.dg : a.du);
                                         }
                                         return sum;
                                       }),
                             multiples(E, F)));
    }
    report.add("db2", worst_error(wide(l.db2.host()),
                                  reference(E * D,
                                            [=] __device__(std::int64_t i) {
                                              double sum = 0;
                                              for (int row = first[i / D]; row < first[i / D + 1];
                                                   ++row)
                                                sum += (v.scores && !v.before ? v.score[row] : 1) *
                                                       wide(v.dy[v.token[row] * D + i % D]);
                                              return sum;
                                            }),
                                  multiples(E, D)));
  }
  report.add("guard bands", l.guards_intact());
}

// ---- routings ----

/// K different experts for each token, experts drawn with weights; 0: never.
std::vector<std::int64_t> choose(const LayerConfig& c, std::vector<double> weights,
                                 std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> out;
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    auto left = weights;
    for (std::int64_t k = 0; k < c.top_k; ++k) {
      std::discrete_distribution<std::int64_t> draw(left.begin(), left.end());
      out.push_back(draw(random));
      left[out.back()] = 0;
    }
  }
  return out;
}
std::vector<double> even(std::int64_t experts) { return std::vector<double>(experts, 1.); }
std::vector<double> skewed(std::int64_t experts) {
  std::vector<double> weights(experts);
  for (std::int64_t e = 0; e < experts; ++e)
    weights[e] = e % 3 == 1 && e > 3 ? 0. : 1. / (1. + static_cast<double>(mix(e) % 50));
  return weights;
}
/// Exactly these counts, tokens in random order; K = 1.
std::vector<std::int64_t> with_counts(const std::vector<int>& counts, std::uint64_t seed) {
  std::vector<std::int64_t> out;
  for (size_t e = 0; e < counts.size(); ++e)
    out.insert(out.end(), counts[e], static_cast<std::int64_t>(e));
  std::shuffle(out.begin(), out.end(), std::mt19937_64(seed));
  return out;
}
const std::vector<int> kHardCounts = {0,   1,   63,  64, 65, 0,  127, 128, 129,
                                      255, 256, 257, 2,  0,  17, 191, 0};

void run_case(const std::string& title, const LayerConfig& c,
              const std::vector<std::int64_t>& experts, std::uint64_t seed) {
  DeviceLayer l(c, seed);
  if (!experts.empty()) l.experts_TK.copy_from(experts);
  check_layer(title, l);
}

// ---- gate ----

void check_gate(const std::string& title, const Gate& g, std::uint64_t seed) {
  Report report{title, {}};
  DeviceGate router(g, seed);
  const std::int64_t T = g.num_tokens, D = g.model, E = g.num_experts;
  Buffer<bf16> x(T * D);
  fill(x, 1.f, seed);
  router.poison();
  router.forward(x.get(), nullptr), router.backward(x.get(), nullptr);
  MOESH_RUN(cudaDeviceSynchronize());
  const bf16* x_TD = x.get();
  const float *gate = router.gate.get(), *dl = router.d_logits.get();
  report.add("logits",
             worst_error(wide(router.logits.host()),
                         reference(T * E,
                                   [=] __device__(std::int64_t i) {
                                     const std::int64_t t = i / E, e = i % E;
                                     double sum = 0;
                                     for (std::int64_t d = 0; d < D; ++d)
                                       sum += wide(x_TD[t * D + d]) * gate[e * D + d];
                                     return sum;
                                   }),
                         {T * E}),
             3e-6);  // the tensor cores cut off where float32 would round
  report.add("dgate",
             worst_error(wide(router.d_gate.host()),
                         reference(E * D,
                                   [=] __device__(std::int64_t i) {
                                     double sum = 0;
                                     for (std::int64_t t = 0; t < T; ++t)
                                       sum += dl[t * E + i / D] * wide(x_TD[t * D + i % D]);
                                     return sum;
                                   }),
                         {E * D}),
             1e-4);
  report.add("dx", worst_error(wide(router.dx.host()),
                               reference(T * D,
                                         [=] __device__(std::int64_t i) {
                                           double sum = 0;
                                           for (std::int64_t e = 0; e < E; ++e)
                                             sum += static_cast<double>(dl[i / D * E + e]) *
                                                    gate[e * D + i % D];
                                           return sum;
                                         }),
                               {T * D}));
  report.add("guard bands", router.guards_intact());
}

/// Among equal scores the lowest expert comes first. A NaN is above all.
void check_top_k() {
  Report report{"ties and NaN of the choice", {}};
  for (const std::int64_t E : {std::int64_t{48}, std::int64_t{128}, std::int64_t{200}}) {
    const std::int64_t T = 300, K = 6;
    Buffer<float> scores(T * E), values(T * K);
    Buffer<std::int64_t> experts(T * K);
    fill(scores, 1.f, 3);
    auto host = scores.host();
    for (auto& v : host) v = std::floor(v * 2);  // most rows have ties
    host[217 * E + 5] = host[203 * E + 9] = NAN;
    scores.copy_from(host);
    values.poison(), experts.poison();
    MOESH_RUN(top_k(scores.get(), T, E, K, values.get(), experts.get(), nullptr));
    MOESH_RUN(cudaDeviceSynchronize());
    const auto got = experts.host();
    bool good = true;
    for (std::int64_t t = 0; t < T; ++t) {
      std::vector<std::int64_t> order(E);
      std::iota(order.begin(), order.end(), 0);
      const auto key = [&](std::int64_t e) {
        return std::isnan(host[t * E + e]) ? INFINITY : host[t * E + e];
      };
      std::stable_sort(order.begin(), order.end(),
                       [&](std::int64_t a, std::int64_t b) { return key(a) > key(b); });
      good &= std::equal(order.begin(), order.begin() + K, got.begin() + t * K);
    }
    report.add("order", good && values.guards_intact() && experts.guards_intact());
  }
}

// ---- laws ----

std::vector<std::uint8_t> bits(DeviceLayer& l) {
  std::vector<std::uint8_t> all;
  auto append = [&](const void* from, std::int64_t bytes) {
    const size_t at = all.size();
    all.resize(at + bytes);
    MOESH_RUN(cudaMemcpy(all.data() + at, from, bytes, cudaMemcpyDeviceToHost));
  };
  for (auto* b : l.results()) append(b->get(), b->size() * 2);
  append(l.d_score.get(), l.d_score.size() * 4);
  append(l.of_router.logits.get(), l.of_router.logits.size() * 4);
  append(l.of_router.d_gate.get(), l.of_router.d_gate.size() * 4);
  return all;
}

void check_same_bits(const LayerConfig& c, std::vector<double> weights) {
  Report report{"same bits twice, and from a graph", {}};
  DeviceLayer l(c, 77);
  l.experts_TK.copy_from(choose(c, std::move(weights), 5));
  std::vector<std::uint8_t> first;
  for (int run = 0; run < 3; ++run) {
    l.poison();
    l.forward(nullptr), l.backward(nullptr);
    MOESH_RUN(cudaDeviceSynchronize());
    if (run == 0) first = bits(l);
    report.add("bits", bits(l) == first);
  }
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  MOESH_RUN(cudaStreamCreate(&stream));
  MOESH_RUN(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  l.forward(stream), l.backward(stream);
  MOESH_RUN(cudaStreamEndCapture(stream, &graph));
  MOESH_RUN(cudaGraphInstantiate(&replay, graph, 0));
  for (int run = 0; run < 2; ++run) {
    l.poison();
    MOESH_RUN(cudaGraphLaunch(replay, stream));
    MOESH_RUN(cudaDeviceSynchronize());
    report.add("graph", bits(l) == first);
  }
}

/// The first tokens of a batch by themselves, and with others behind them.
void check_batch() {
  Report report{"a token's rows do not depend on the batch", {}};
  LayerConfig c{.tokens = 900, .model = 264, .ffn = 200, .experts = 8, .top_k = 2};
  const auto experts = choose(c, skewed(8), 9);
  DeviceLayer whole(c, 31);
  whole.experts_TK.copy_from(experts);
  whole.forward(nullptr), whole.backward(nullptr);
  c.tokens = 333;
  DeviceLayer part(c, 31);  // the same weights and first rows of x and dy
  part.experts_TK.copy_from({experts.begin(), experts.begin() + c.tokens * c.top_k});
  part.forward(nullptr), part.backward(nullptr);
  MOESH_RUN(cudaDeviceSynchronize());
  const auto y = whole.y.host(), y_part = part.y.host(), dx = whole.dx_.host(),
             dx_part = part.dx_.host();
  report.add("y", std::memcmp(y.data(), y_part.data(), y_part.size() * 2) == 0);
  report.add("dx", std::memcmp(dx.data(), dx_part.data(), dx_part.size() * 2) == 0);
  const auto score = whole.d_score.host(), score_part = part.d_score.host();
  const auto at = whole.inverse.host(), at_part = part.inverse.host();
  bool same = true;
  for (size_t i = 0; i < at_part.size(); ++i) same &= score[at[i]] == score_part[at_part[i]];
  report.add("dS", same);
}

/// All rows of some experts are NaN; those of the others keep their bits.
void check_nan_stays() {
  Report report{"a NaN stays with its expert", {}};
  std::int64_t tokens = 0;
  for (int n : kHardCounts) tokens += n;
  const LayerConfig c{.tokens = tokens,
                      .model = 136,
                      .ffn = 72,
                      .experts = static_cast<std::int64_t>(kHardCounts.size()),
                      .top_k = 1};
  const auto experts = with_counts(kHardCounts, 3);
  DeviceLayer clean(c, 8), dirty(c, 8);
  clean.experts_TK.copy_from(experts), dirty.experts_TK.copy_from(experts);
  auto x = dirty.x.host(), dy = dirty.dy.host();
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    if (experts[t] % 2 == 1) continue;
    for (std::int64_t d = 0; d < c.model; ++d)
      x[t * c.model + d] = dy[t * c.model + d] = static_cast<bf16>(NAN);
  }
  dirty.x.copy_from(x), dirty.dy.copy_from(dy);
  for (auto* l : {&clean, &dirty}) l->forward(nullptr), l->backward(nullptr);
  MOESH_RUN(cudaDeviceSynchronize());
  auto same = [&](const Buffer<bf16>& a, const Buffer<bf16>& b) {
    const auto p = a.host(), q = b.host();
    const std::int64_t size = c.model * c.ffn;
    bool good = true;
    for (std::int64_t e = 1; e < c.experts; e += 2)
      good &= std::memcmp(&p[e * size], &q[e * size], size * 2) == 0;
    return good;
  };
  report.add("dw1", same(clean.dw1, dirty.dw1));
  report.add("dw3", same(clean.dw3, dirty.dw3));
  report.add("dw2", same(clean.dw2_, dirty.dw2_));
  const auto y = clean.y.host(), z = dirty.y.host(), dx = clean.dx_.host(), dz = dirty.dx_.host();
  bool good = true;
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    if (experts[t] % 2 == 0) continue;
    good &= std::memcmp(&y[t * c.model], &z[t * c.model], c.model * 2) == 0;
    good &= std::memcmp(&dx[t * c.model], &dz[t * c.model], c.model * 2) == 0;
  }
  report.add("y, dx", good);
}

int run(bool quick) {
  MOESH_RUN(check_hopper(0));
  std::int64_t hard = 0;
  for (int n : kHardCounts) hard += n;
  const auto num_hard = static_cast<std::int64_t>(kHardCounts.size());
  const auto hard_experts = with_counts(kHardCounts, 1);
  if (quick) {
    run_case("hard counts",
             {.tokens = hard, .model = 136, .ffn = 72, .experts = num_hard, .top_k = 1},
             hard_experts, 1);
    LayerConfig c{.tokens = 90, .model = 72, .ffn = 264, .experts = 8, .top_k = 3};
    c.clamped = c.biases = true;
    run_case("clamped, biases", c, choose(c, skewed(8), 3), 3);
    check_gate("gate", {.num_tokens = 100, .model = 72, .num_experts = 24}, 2);
    return failures;
  }
  for (const auto& [d, f] : std::vector<std::pair<int, int>>{
           {512, 256}, {136, 72}, {8, 8}, {72, 1408}, {1408, 136}, {264, 320}}) {
    run_case("hard counts, D " + std::to_string(d) + ", F " + std::to_string(f),
             {.tokens = hard, .model = d, .ffn = f, .experts = num_hard, .top_k = 1}, hard_experts,
             10 + d);
  }
  LayerConfig c;
  auto random = [](const std::string& title, const LayerConfig& c, std::vector<double> weights) {
    run_case(title, c, choose(c, std::move(weights), c.tokens), c.tokens + c.experts);
  };
  random("one expert", {.tokens = 300, .model = 128, .ffn = 128, .experts = 1, .top_k = 1},
         even(1));
  random("one token", {.tokens = 1, .model = 256, .ffn = 256, .experts = 8, .top_k = 2}, even(8));
  run_case("no token", {.tokens = 0, .model = 256, .ffn = 256, .experts = 8, .top_k = 2}, {}, 4);
  random("64 experts, K 6", {.tokens = 1000, .model = 512, .ffn = 1408, .experts = 64, .top_k = 6},
         even(64));
  random("256 experts, K 16, few rows",
         {.tokens = 100, .model = 128, .ffn = 64, .experts = 256, .top_k = 16}, even(256));
  random("512 experts, K 8, skewed",
         {.tokens = 1000, .model = 72, .ffn = 64, .experts = 512, .top_k = 8}, skewed(512));
  random("16 experts, K 4, skewed",
         {.tokens = 900, .model = 512, .ffn = 384, .experts = 16, .top_k = 4}, skewed(16));
  run_case("all rows to one expert",
           {.tokens = 700, .model = 512, .ffn = 256, .experts = 8, .top_k = 1},
           std::vector<std::int64_t>(700, 3), 6);
  // The sums of dW in chunks: a few experts with many rows.
  c = {.tokens = 6000, .model = 520, .ffn = 264, .experts = 8, .top_k = 1};
  run_case("6000 rows to one expert", c, std::vector<std::int64_t>(6000, 3), 7);
  c = {.tokens = 6000, .model = 264, .ffn = 136, .experts = 6, .top_k = 2};
  random("few rows but for two experts", c, {40, 1e-3, 1e-2, 40, 1e-3, 1e-2});
  const LayerConfig base{.tokens = 500, .model = 360, .ffn = 328, .experts = 8, .top_k = 3};
  c = base;
  c.scores = false;
  random("no scores", c, skewed(8));
  c = base, c.before = true;
  random("score before", c, skewed(8));
  c = base, c.clamped = true, c.biases = true;
  random("clamped, biases", c, skewed(8));
  c.before = true;
  random("clamped, biases, score before", c, skewed(8));
  c.biases = false;
  random("clamped, score before", c, skewed(8));
  c = base, c.biases = true, c.scores = false;
  random("biases, no scores", c, skewed(8));
  c = base, c.gathered = false, c.biases = true, c.clamped = true;
  random("rows already at their experts", c, skewed(8));
  c = base, c.experts = 24, c.first_expert = 7, c.num_experts = 9;
  random("9 of 24 experts", c, skewed(24));
  for (const auto& [tokens, model, experts] : {std::tuple(500, 512, 64),
                                               {1001, 512, 16},
                                               {500, 264, 128},
                                               {129, 264, 200},
                                               {500, 72, 30},
                                               {1, 2048, 256},
                                               {0, 128, 8}})
    check_gate("gate of " + std::to_string(experts) + " experts, D " + std::to_string(model),
               {.num_tokens = tokens, .model = model, .num_experts = experts}, tokens);
  check_top_k();
  check_same_bits(
      {.tokens = 700, .model = 512, .ffn = 384, .experts = 16, .top_k = 4, .gate = true},
      skewed(16));
  check_same_bits({.tokens = 6000, .model = 264, .ffn = 136, .experts = 6, .top_k = 2},
                  {40, 1e-3, 1e-2, 40, 1e-3, 1e-2});
  check_batch();
  check_nan_stays();
  std::printf("%s\n", failures ? "FAILED" : "all ok");
  return failures;
}

}  // namespace
}  // namespace moesh::kernels::cuda

int main(int argc, char** argv) {
  return moesh::kernels::cuda::run(argc > 1 && std::string(argv[1]) == "quick");
}
