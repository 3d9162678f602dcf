// The MoE layer on one Hopper GPU, forward and backward, kernel by kernel and as a whole.
// usage: moe_layer_gpu [seconds per measurement, 1.2] [shapes, 1234] [routings, random] [kernels,
// layer or lora: with its kernels, only the layer, or the products of LoRA of rank 16]
//   moe_layer_gpu 1 1,4096/5120/1536/160/6 random,balanced,collapsed,zipf,empty layer
// The first of the four shapes, and T/D/F/E/K of your own (a c at its end: biases and the clamped
// activation, as GPT-OSS); collapsed: every token to the same K.
//   burst   runs 3 to 8 after a rest, at the boost clock
//   steady  the second half of a time without pause, at the power limit: training lives there
// The same once more in float8 (names with an 8): `weights8` is what a step pays once for a layer,
// layer8 + w pays it in every micro-batch. TFLOP/s of 18 R D F for the layer, whatever is executed.
// `floor` is the part of the steady time that a kernel cannot go below: its operations at the speed
// of a dense product, or its fewest bytes at 4.3 TB/s. Dense: 8192^3 through cuBLAS in the same
// run, where libcublas.so.13 can be loaded. T tokens, D model, F ffn, E experts, K top-k, R rows at
// their experts

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <sstream>
#include <string>

#include "moesh/kernels/cuda/float8.h"
#include "tests/kernels/cuda/device_layer.h"

namespace moesh::kernels::cuda {
namespace {

enum Routing { random_, balanced, collapsed, zipf, empty };
const char* const kRoutings[] = {"random", "balanced", "collapsed", "zipf", "empty"};

const LayerConfig kShapes[4] = {
    {.tokens = 16384, .model = 2048, .ffn = 1408, .experts = 64, .top_k = 6},
    {.tokens = 8192, .model = 4096, .ffn = 1536, .experts = 128, .top_k = 8},
    {.tokens = 32768, .model = 2048, .ffn = 768, .experts = 128, .top_k = 8},
    {.tokens = 16384, .model = 7168, .ffn = 2048, .experts = 32, .top_k = 8},
};

/// The K largest of log(prior) + Gumbel noise: draws without putting back.
__global__ void choose_experts(LayerConfig c, int routing, std::int64_t* experts_TK,
                               std::uint64_t seed) {
  const std::int64_t t = blockIdx.x * 128ll + threadIdx.x;
  if (t >= c.tokens) return;
  const int top_k = static_cast<int>(c.top_k);
  if (routing == balanced || routing == collapsed) {
    const std::int64_t start = routing == balanced ? t * 769 % c.tokens * top_k : 0;
    // experts that are not neighbours
    const std::int64_t step = routing == balanced ? 1 : c.experts / c.top_k;
    for (int k = 0; k < top_k; ++k) experts_TK[t * top_k + k] = (start + k * step) % c.experts;
    return;
  }
  float best[16];
  int chosen[16];
  for (int k = 0; k < top_k; ++k) best[k] = -INFINITY, chosen[k] = 0;
  for (int e = 0; e < c.experts; ++e) {
    const float uniform =
        (static_cast<float>(mix(seed + t * c.experts + e) >> 40) + 0.5f) * 0x1p-24f;
    float value = -logf(-logf(uniform));
    if (routing == zipf) value -= logf(static_cast<float>(e + 1));
    if (routing == empty && e == 1) value = -1e30f;
    int place = top_k;
    while (place > 0 && value > best[place - 1]) --place;
    if (place == top_k) continue;
    for (int k = top_k - 1; k > place; --k) best[k] = best[k - 1], chosen[k] = chosen[k - 1];
    best[place] = value, chosen[place] = e;
  }
  for (int k = 0; k < top_k; ++k) experts_TK[t * top_k + k] = chosen[k];
}

struct Times {
  double burst, steady;
};

double median(std::vector<float> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? NAN : v[v.size() / 2];
}

/// `prepare` is run before each run, and not timed.
Times measure(
    double seconds, const std::function<void()>& run,
    const std::function<void()>& prepare = [] {}) {
  cudaEvent_t begin, end;
  MOESH_RUN(cudaEventCreate(&begin));
  MOESH_RUN(cudaEventCreate(&end));
  MOESH_RUN(cudaDeviceSynchronize());
  usleep(static_cast<unsigned>(1e6 * std::min(0.4, seconds)));
  std::vector<float> all;
  for (double sum = 0; sum < seconds * 1e3 || all.size() < 10;) {
    float ms;
    prepare();
    MOESH_RUN(cudaEventRecord(begin));
    run();
    MOESH_RUN(cudaEventRecord(end));
    MOESH_RUN(cudaEventSynchronize(end));
    MOESH_RUN(cudaEventElapsedTime(&ms, begin, end));
    all.push_back(ms), sum += ms;
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  return {median({all.begin() + 2, all.begin() + 8}),
          median({all.begin() + all.size() / 2, all.end()})};
}

/// C = A B' of bf16 through cuBLAS, if it is there.
class Dense {
 public:
  Dense() {
    void* library = dlopen("libcublas.so.13", RTLD_NOW);
    if (!library) return;
    const auto create = reinterpret_cast<int (*)(void**)>(dlsym(library, "cublasCreate_v2"));
    if (create && create(&handle_) == 0)
      gemm_ = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx"));
  }
  explicit operator bool() const { return gemm_; }
  void operator()(const bf16* a, const bf16* b, bf16* c, int n) const {
    const float one = 1, zero = 0;
    constexpr int kTransposed = 1, kBf16 = 14, kFloat = 68;
    gemm_(handle_, kTransposed, 0, n, n, n, &one, b, kBf16, n, a, kBf16, n, &zero, c, kBf16, n,
          kFloat, -1);
  }

 private:
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int,
                       const void*, int, int, const void*, void*, int, int, int, int);
  void* handle_ = nullptr;
  Gemm gemm_ = nullptr;
};

double dense(double seconds) {
  static const Dense gemm;
  if (!gemm) return 0;
  constexpr int kN = 8192;
  const Buffer<bf16> a(kN * kN), b(kN * kN), c(kN * kN);
  fill(a, 1.f, 1), fill(b, 1.f, 2);
  const Times t = measure(seconds, [&] { gemm(a.get(), b.get(), c.get(), kN); });
  const double flops = 2.0 * kN * kN * kN;
  std::printf("dense 8192^3          burst %4.0f  steady %4.0f TFLOP/s\n", flops / t.burst * 1e-9,
              flops / t.steady * 1e-9);
  return flops / t.steady * 1e-9;
}

/// What a layer in float8 has besides, and its kernels in order.
class Float8Layer {
 public:
  explicit Float8Layer(DeviceLayer& layer) : l_(layer), c_(layer.config), e_(layer.experts()) {
    for (Buffer<std::uint8_t>* b : {&w1_, &w3_, &w2_, &w1t_, &w3t_, &w2t_})
      *b = Buffer<std::uint8_t>(l_.w1.size());
    for (Buffer<float>* b : {&s1_, &s3_, &s2_})
      *b = Buffer<float>(c_.experts * float8_tiles(c_.model) * float8_tiles(c_.ffn));
    wide_ = Buffer<std::uint8_t>(l_.rows * c_.model);
    wide_scales_ = Buffer<float>(scale_pitch(l_.rows) * float8_tiles(c_.model));
    for (Buffer<std::uint8_t>* b : {&gate_, &up_}) *b = Buffer<std::uint8_t>(l_.rows * c_.ffn);
    for (Buffer<float>* b : {&gate_scales_, &up_scales_})
      *b = Buffer<float>(scale_pitch(l_.rows) * float8_tiles(c_.ffn));
  }

  void weights() {
    MOESH_RUN(float8_weight(l_.w1.get(), false, w1_.get(), w1t_.get(), s1_.get(), c_.experts,
                            c_.ffn, c_.model, nullptr));
    MOESH_RUN(float8_weight(l_.w3.get(), false, w3_.get(), w3t_.get(), s3_.get(), c_.experts,
                            c_.ffn, c_.model, nullptr));
    MOESH_RUN(float8_weight(l_.w2.get(), false, w2_.get(), w2t_.get(), s2_.get(), c_.experts,
                            c_.model, c_.ffn, nullptr));
  }
  void expand_x() { expand_rows(l_.x, false); }
  void up() {
    multiply({.width = c_.ffn,
              .depth = c_.model,
              .a = {wide()},
              .b = {{w1_.get(), s1_.get(), false}, {w3_.get(), s3_.get(), false}},
              .out = {l_.gate.get(), l_.up_.get()}});
  }
  void act() { MOESH_RUN(act8(e_, l_.gate.get(), l_.up_.get(), gate(), nullptr)); }
  void down() {
    multiply({.width = c_.model,
              .depth = c_.ffn,
              .a = {gate()},
              .b = {{w2_.get(), s2_.get(), false}},
              .out = {l_.y_R.get()},
              .bias = e_.b2_ED,
              .score = e_.score_R});
  }
  void expand_dy() { expand_rows(l_.dy, true); }
  void dh() {
    multiply({.width = c_.ffn,
              .depth = c_.model,
              .a = {wide()},
              .b = {{w2t_.get(), s2_.get(), true}},
              .out = {l_.act.get()}});
  }
  void dh_pass() {
    MOESH_RUN(dh8(e_, l_.act.get(), l_.gate.get(), l_.up_.get(), gate(), up_rows(),
                  l_.d_score_terms.get(), nullptr));
  }
  void dx() {
    multiply({.width = c_.model,
              .depth = c_.ffn,
              .a = {gate(), up_rows()},
              .b = {{w1t_.get(), s1_.get(), true}, {w3t_.get(), s3_.get(), true}},
              .out = {l_.dx_R.get()}});
  }

  void forward() {
    if (c_.gate) l_.of_router.forward(l_.x.get(), nullptr);
    MOESH_RUN(sort(l_.sort_arguments(), nullptr));
    expand_x(), up(), act(), down();
    MOESH_RUN(combine(l_.y_R.get(), l_.inverse.get(), nullptr, l_.y.get(), c_.tokens, c_.top_k,
                      c_.model, nullptr));
  }
  void backward() {
    expand_dy(), dh(), dh_pass();
    MOESH_RUN(
        score_gradient(e_, l_.rows_.get(), l_.d_score_terms.get(), l_.d_score.get(), nullptr));
    MOESH_RUN(dw2(e_, l_.rows_.get(), l_.act.get(), l_.dw2_.get(), l_.chunks.get(), nullptr));
    if (c_.biases)
      MOESH_RUN(bias_gradients(e_, l_.rows_.get(), l_.gate.get(), l_.up_.get(), l_.bias_terms.get(),
                               l_.db1.get(), l_.db3.get(), l_.db2.get(), nullptr));
    dx();
    if (c_.gate) l_.of_router.backward(l_.x.get(), nullptr);
    MOESH_RUN(combine(l_.dx_R.get(), l_.inverse.get(), c_.gate ? l_.of_router.dx.get() : nullptr,
                      l_.dx_.get(), c_.tokens, c_.top_k, c_.model, nullptr));
    MOESH_RUN(dw13(e_, l_.at_experts(l_.x, nullptr), l_.gate.get(), l_.up_.get(), l_.dw1.get(),
                   l_.dw3.get(), l_.chunks.get(), nullptr));
  }

 private:
  Float8Rows wide() { return {wide_.get(), wide_scales_.get()}; }
  Float8Rows gate() { return {gate_.get(), gate_scales_.get()}; }
  Float8Rows up_rows() { return {up_.get(), up_scales_.get()}; }
  void expand_rows(const Buffer<bf16>& x, bool numbers) {
    MOESH_RUN(expand8(x.get(), l_.inverse.get(), numbers ? l_.rows_.get() : nullptr, wide(),
                      c_.tokens, c_.top_k, l_.rows, c_.model, nullptr));
  }
  void multiply(Float8Product p) {
    p.num_rows = l_.rows, p.num_experts = c_.experts, p.ends_E = l_.ends.get();
    MOESH_RUN(float8_product(p, nullptr));
  }

  DeviceLayer& l_;
  LayerConfig c_;
  GroupedExperts e_;
  Buffer<std::uint8_t> w1_, w3_, w2_, w1t_, w3t_, w2t_, wide_, gate_, up_;
  Buffer<float> s1_, s3_, s2_, wide_scales_, gate_scales_, up_scales_;
};

/// "1" to "4", or "T/D/F/E/K".
LayerConfig shape_of(const std::string& text) {
  LayerConfig c{};
  const int read = std::sscanf(text.c_str(), "%ld/%ld/%ld/%ld/%ld", &c.tokens, &c.model, &c.ffn,
                               &c.experts, &c.top_k);
  c.clamped = c.biases = text.back() == 'c';
  if (read == 1 && c.tokens >= 1 && c.tokens <= 4) return kShapes[c.tokens - 1];
  if (read == 5 && c.top_k >= 1 && c.top_k <= 16) return c;
  std::printf("shape '%s'; pass 1 to 4, or T/D/F/E/K with K of at most 16\n", text.c_str());
  std::exit(1);
}

/// dh writes over what it reads: run again on its own gradients, it would soon time zeros.
class Restored {
 public:
  explicit Restored(const DeviceLayer& l) : layer_(l), gate_(l.gate.size()), up_(l.up_.size()) {
    copy(gate_, l.gate), copy(up_, l.up_);
  }
  void operator()() const { copy(layer_.gate, gate_), copy(layer_.up_, up_); }

 private:
  static void copy(const Buffer<bf16>& to, const Buffer<bf16>& from) {
    MOESH_RUN(cudaMemcpyAsync(to.get(), from.get(), to.bytes(), cudaMemcpyDeviceToDevice));
  }
  const DeviceLayer& layer_;
  Buffer<bf16> gate_, up_;
};

/// The products of LoRA, and those to which it adds something, without and with that.
template <class Line>
void lora_lines(DeviceLayer& l, double each, const Line& line) {
  constexpr std::int64_t r = 16;
  const LayerConfig& c = l.config;
  const Buffer<bf16> a13(c.experts * r * c.model), b13(c.experts * 2 * c.ffn * r),
      a2(c.experts * r * c.ffn), b2(c.experts * c.model * r), low(l.rows * r), d_low(l.rows * r),
      d(2 * c.experts * r * std::max(c.model, c.ffn));
  for (auto* t : {&a13, &b13, &a2, &b2, &low}) fill(*t, 0.02f, 7);
  const auto of = [&](const bf16* rows, const bf16* more, std::int64_t width, bool tokens) {
    return LowRank{.num_rows = l.rows,
                   .num_experts = c.experts,
                   .ends_E = l.ends.get(),
                   .rank = r,
                   .width = width,
                   .num_parts = more ? 2 : 1,
                   .rows = {rows, more},
                   .token_R = tokens ? l.token.get() : nullptr};
  };
  const LowRank x = of(l.x.get(), nullptr, c.model, true),
                dy = of(l.dy.get(), nullptr, c.model, true),
                act = of(l.act.get(), nullptr, c.ffn, false),
                gates = of(l.gate.get(), l.up_.get(), c.ffn, false);
  const Buffer<float> sums(std::max(low_rank_workspace(dy, true), low_rank_workspace(gates, true)));
  const double rf = static_cast<double>(l.rows * c.ffn), rd = static_cast<double>(l.rows * c.model);
  const auto low_of = [&](const LowRank& rows, const Buffer<bf16>& a) {
    return [&] { MOESH_RUN(low_rank(rows, a.get(), 0.5f, low.get(), nullptr)); };
  };
  const auto da_of = [&](const LowRank& rows) {
    return [&] { MOESH_RUN(low_rank_da(rows, low.get(), sums.get(), d.get(), nullptr)); };
  };
  const auto db_of = [&](const LowRank& rows, const Buffer<bf16>& b) {
    return [&] {
      MOESH_RUN(
          low_rank_db(rows, b.get(), low.get(), 0.5f, sums.get(), d.get(), d_low.get(), nullptr));
    };
  };
  line("low13", 0, 2 * rd, measure(each, low_of(x, a13)));
  line("low2", 0, 2 * rf, measure(each, low_of(act, a2)));
  line("db2", 0, 2 * rd, measure(each, db_of(dy, b2)));
  line("da2", 0, 2 * rf, measure(each, da_of(act)));
  line("db13", 0, 4 * rf, measure(each, db_of(gates, b13)));
  line("da13", 0, 2 * rd, measure(each, da_of(x)));
  const double product = 2.0 * static_cast<double>(c.model) * rf;
  const GroupedExperts e = l.experts();
  GroupedExperts of_up = e, of_down = e, of_dh = e, of_dx = e;
  of_up.added = {low.get(), b13.get(), r}, of_down.added = {low.get(), b2.get(), r};
  of_dh.added = {low.get(), a2.get(), r}, of_dx.added = {low.get(), a13.get(), r};
  for (const bool added : {false, true, false, true}) {
    std::printf(added ? "  with what LoRA adds\n" : "  without\n");
    line("up", 2 * product, 0, measure(each, [&] {
           MOESH_RUN(up(added ? of_up : e, l.rows_.get(), l.gate.get(), l.up_.get(), l.act.get(),
                        nullptr));
         }));
    line("down", product, 0, measure(each, [&] {
           MOESH_RUN(down(added ? of_down : e, l.act.get(), l.y_R.get(), nullptr));
         }));
    line("dx", 2 * product, 0, measure(each, [&] {
           MOESH_RUN(dx(added ? of_dx : e, l.gate.get(), l.up_.get(), l.dx_R.get(), nullptr));
         }));
    const Restored restored(l);
    const auto time_dh = [&] {
      MOESH_RUN(dh(added ? of_dh : e, l.rows_.get(), l.gate.get(), l.up_.get(), l.act.get(),
                   l.d_score_terms.get(), nullptr));
    };
    line("dh", product, 0, measure(2 * each, time_dh, [&] { restored(); }));
  }
}

void run_shape(LayerConfig c, int routing, double seconds, double dense_speed,
               const std::string& what) {
  c.gate = c.experts <= 256;
  DeviceLayer l(c, 40 + c.ffn);
  choose_experts<<<static_cast<unsigned>((c.tokens + 127) / 128), 128>>>(c, routing,
                                                                         l.experts_TK.get(), 99);
  const double rows = static_cast<double>(l.rows),
               product = 2.0 * rows * static_cast<double>(c.model) * static_cast<double>(c.ffn);
  l.forward(nullptr), l.backward(nullptr);
  MOESH_RUN(cudaDeviceSynchronize());
  const GroupedExperts e = l.experts();
  std::printf("T %ld D %ld F %ld E %ld K %ld, %s\n", c.tokens, c.model, c.ffn, c.experts, c.top_k,
              kRoutings[routing]);
  auto line = [&](const char* name, double flops, double bytes, const Times& t) {
    const double floor = std::max(flops / dense_speed * 1e-9, bytes / 4.3e9);
    std::printf(
        "  %-10s burst %8.3f ms %5.0f TFLOP/s %5.2f TB/s   steady %8.3f ms %5.0f TFLOP/s %5.2f TB/s"
        "   floor %.2f\n",
        name, t.burst, flops / t.burst * 1e-9, bytes / t.burst * 1e-9, t.steady,
        flops / t.steady * 1e-9, bytes / t.steady * 1e-9, floor / t.steady);
    std::fflush(stdout);
  };
  if (what == "lora") return lora_lines(l, seconds / 4, line);
  if (what == "kernels") {
    const double rf = rows * static_cast<double>(c.ffn), rd = rows * static_cast<double>(c.model);
    const double td = static_cast<double>(c.tokens * c.model),
                 w = static_cast<double>(c.experts * c.model * c.ffn);
    const double each = seconds / 4;
    const double gate_flops = 2.0 * static_cast<double>(c.tokens * c.model * c.experts);
    line("gate", gate_flops, 2 * td,
         measure(each, [&] { l.of_router.forward(l.x.get(), nullptr); }));
    line("d_gate", 2 * gate_flops, 4 * td,
         measure(each, [&] { l.of_router.backward(l.x.get(), nullptr); }));
    line("sort", 0, 20 * rows,
         measure(each, [&] { MOESH_RUN(sort(l.sort_arguments(), nullptr)); }));
    line("expand", 0, 2 * (rd + td), measure(each, [&] { l.at_experts(l.x, nullptr); }));
    line("up", 2 * product, 2 * td + 4 * w + 6 * rf, measure(each, [&] {
           MOESH_RUN(up(e, l.rows_.get(), l.gate.get(), l.up_.get(), l.act.get(), nullptr));
         }));
    line("down", product, 2 * rf + 2 * w + 2 * rd,
         measure(each, [&] { MOESH_RUN(down(e, l.act.get(), l.y_R.get(), nullptr)); }));
    line("combine", 0, 2 * (rd + td), measure(each, [&] {
           MOESH_RUN(combine(l.y_R.get(), l.inverse.get(), nullptr, l.y.get(), c.tokens, c.top_k,
                             c.model, nullptr));
         }));
    Restored restored(l);
    auto restore = [&] { restored(); };
    auto time_dh = [&] {
      MOESH_RUN(dh(e, l.rows_.get(), l.gate.get(), l.up_.get(), l.act.get(), l.d_score_terms.get(),
                   nullptr));
    };
    line("dh", product, 2 * td + 2 * w + 10 * rf, measure(2 * each, time_dh, restore));
    line("scores", 0, 4 * rows * static_cast<double>(num_score_terms(c.ffn)), measure(each, [&] {
           MOESH_RUN(
               score_gradient(e, l.rows_.get(), l.d_score_terms.get(), l.d_score.get(), nullptr));
         }));
    if (c.biases)
      line("biases", 0, 4 * rf + 2 * rd, measure(each, [&] {
             MOESH_RUN(bias_gradients(e, l.rows_.get(), l.gate.get(), l.up_.get(),
                                      l.bias_terms.get(), l.db1.get(), l.db3.get(), l.db2.get(),
                                      nullptr));
           }));
    line("dx", 2 * product, 4 * rf + 4 * w + 2 * rd, measure(each, [&] {
           MOESH_RUN(dx(e, l.gate.get(), l.up_.get(), l.dx_R.get(), nullptr));
         }));
    line("dw13", 2 * product, 2 * td + 4 * rf + 4 * w, measure(each, [&] {
           MOESH_RUN(dw13(e, l.rows_.get(), l.gate.get(), l.up_.get(), l.dw1.get(), l.dw3.get(),
                          l.chunks.get(), nullptr));
         }));
    line("dw2", product, 2 * td + 2 * rf + 2 * w, measure(each, [&] {
           MOESH_RUN(dw2(e, l.rows_.get(), l.act.get(), l.dw2_.get(), l.chunks.get(), nullptr));
         }));
  }
  line("forward", 3 * product, 0, measure(seconds, [&] { l.forward(nullptr); }));
  line("layer", 9 * product, 0, measure(seconds, [&] { l.forward(nullptr), l.backward(nullptr); }));
  if (c.model % 16 != 0 || c.ffn % 16 != 0) return;
  Float8Layer f(l);
  const double rf = rows * static_cast<double>(c.ffn), rd = rows * static_cast<double>(c.model);
  const double td = static_cast<double>(c.tokens * c.model),
               w = static_cast<double>(c.experts * c.model * c.ffn);
  auto line8 = [&](const char* name, double flops, double bytes, const std::function<void()>& run) {
    line(name, flops, bytes, measure(seconds / 4, run));
  };
  line8("weights8", 0, 3 * 4 * w, [&] { f.weights(); });
  f.forward();
  if (what == "kernels") {
    line8("expand8 x", 0, 2 * td + rd, [&] { f.expand_x(); });
    line8("up8", 2 * product, rd + 2 * w + 4 * rf, [&] { f.up(); });
    line8("act8", 0, 5 * rf, [&] { f.act(); });
    line8("down8", product, rf + w + 2 * rd, [&] { f.down(); });
    line8("expand8dy", 0, 2 * td + 3 * rd, [&] { f.expand_dy(); });
    line8("dh8", product, rd + w + 2 * rf, [&] { f.dh(); });
    line("dh8 pass", 0, 14 * rf,
         measure(seconds / 4, [&] { f.dh_pass(); }, [&] { f.expand_x(), f.up(), f.dh(); }));
    line8("dx8", 2 * product, 2 * rf + 2 * w + 2 * rd, [&] { f.dx(); });
  }
  line("forward8", 3 * product, 0, measure(seconds, [&] { f.forward(); }));
  line("layer8", 9 * product, 0, measure(seconds, [&] { f.forward(), f.backward(); }));
  line("layer8 + w", 9 * product, 0,
       measure(seconds, [&] { f.weights(), f.forward(), f.backward(); }));
}

}  // namespace
}  // namespace moesh::kernels::cuda

int main(int argc, char** argv) {
  using namespace moesh::kernels::cuda;
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1.2;
  const std::string shapes = argc > 2 ? argv[2] : "1,2,3,4",
                    routings = argc > 3 ? argv[3] : "random";
  const std::string what = argc < 5 ? "kernels" : argv[4];
  check(check_hopper(0), "device");
  const double measured = dense(seconds), speed = measured > 0 ? measured : 690;
  std::istringstream list(shapes);
  for (std::string shape; std::getline(list, shape, ',');)
    for (const Routing routing : {random_, balanced, collapsed, zipf, empty})
      if (routings.find(kRoutings[routing]) != std::string::npos)
        run_shape(shape_of(shape), routing, seconds, speed, what);
  dense(seconds);
}
