#pragma once
// A mixture-of-experts layer on the device, for the check and the benchmark: its buffers, with
// guard bands and poison, and its kernels in order. No torch. T tokens, D model, F ffn, E experts,
// K top-k, R rows at their experts

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "moesh/kernels/cuda/launch.h"

namespace moesh::kernels::cuda {

using bf16 = __nv_bfloat16;

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}
inline void check(Error error, const char* what) {
  if (!error) return;
  std::printf("%s: %s\n", what, error);
  std::exit(1);
}
#define MOESH_RUN(call) moesh::kernels::cuda::check(call, #call)

/// Memory on the device between two guard bands. Bands and contents start as NaN, whatever the
/// type.
template <class T>
class Buffer {
 public:
  static constexpr std::int64_t kGuard = 4096;  // bytes

  Buffer() = default;
  explicit Buffer(std::int64_t size) : size_(size) {
    MOESH_RUN(cudaMalloc(reinterpret_cast<void**>(&base_), bytes() + 2 * kGuard));
    MOESH_RUN(cudaMemset(base_, 0xFF, bytes() + 2 * kGuard));
  }
  Buffer(Buffer&& other) noexcept : base_(other.base_), size_(other.size_) {
    other.base_ = nullptr;
  }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(base_, other.base_), std::swap(size_, other.size_);
    return *this;
  }
  ~Buffer() { cudaFree(base_); }

  T* get() const { return reinterpret_cast<T*>(base_ + kGuard); }
  std::int64_t size() const { return size_; }
  std::int64_t bytes() const {
    return (size_ * static_cast<std::int64_t>(sizeof(T)) + 15) / 16 * 16;
  }
  void poison() { MOESH_RUN(cudaMemset(get(), 0xFF, bytes())); }
  void copy_from(const std::vector<T>& host) {
    MOESH_RUN(cudaMemcpy(get(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> host() const {
    std::vector<T> out(size_);
    MOESH_RUN(cudaMemcpy(out.data(), get(), size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }
  bool guards_intact() const {
    std::vector<std::uint8_t> all(bytes() + 2 * kGuard);
    MOESH_RUN(cudaMemcpy(all.data(), base_, all.size(), cudaMemcpyDeviceToHost));
    for (std::int64_t i = 0; i < kGuard; ++i)
      if (all[i] != 0xFF || all[all.size() - 1 - i] != 0xFF) return false;
    for (std::int64_t i = kGuard + size_ * static_cast<std::int64_t>(sizeof(T));
         i < kGuard + bytes(); ++i)
      if (all[i] != 0xFF) return false;
    return true;
  }

 private:
  std::uint8_t* base_ = nullptr;
  std::int64_t size_ = 0;
};

struct LayerConfig {
  std::int64_t tokens, model, ffn, experts, top_k;
  bool scores = true, before = false, clamped = false, biases = false;
  std::int64_t first_expert = 0, num_experts = 0;  // those of this rank; 0: all
  bool gathered = true;                            // false: x has the sorted rows themselves
  bool gate = false;  // its logits and their gradients, too; the choices are given
};

/// splitmix64, for the host; the device draws by element index.
__host__ __device__ inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
__device__ inline float normal(std::uint64_t seed, std::uint64_t index) {
  const std::uint64_t bits = mix(seed * 0x632BE59BD9B4E019ull + index);
  const float a = (static_cast<float>(bits >> 40) + 1.f) * 0x1p-24f;
  const float b = static_cast<float>(bits & 0xFFFFFF) * 0x1p-24f;
  return sqrtf(-2.f * logf(a)) * cospif(2.f * b);
}
template <class T>
__global__ void fill_normal(T* to, std::int64_t size, float scale, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * 256ll + threadIdx.x; i < size; i += gridDim.x * 256ll)
    to[i] = static_cast<T>(scale * normal(seed, i));
}
template <class T>
void fill(const Buffer<T>& to, float scale, std::uint64_t seed) {
  if (to.size() > 0) fill_normal<<<1024, 256>>>(to.get(), to.size(), scale, seed);
  MOESH_RUN(cudaGetLastError());
}

/// The gate of a layer. d(logits) is given.
struct DeviceGate {
  Gate config;
  Buffer<float> gate, logits, d_logits, d_gate;
  Buffer<bf16> terms, dx;
  Buffer<std::uint8_t> workspace;

  DeviceGate() = default;
  DeviceGate(const Gate& g, std::uint64_t seed) : config(g) {
    const std::int64_t size = g.num_experts * g.model;
    gate = Buffer<float>(size), d_gate = Buffer<float>(size);
    logits = Buffer<float>(g.num_tokens * g.num_experts);
    d_logits = Buffer<float>(g.num_tokens * g.num_experts);
    terms = Buffer<bf16>(4 * padded_experts(g.num_experts) * g.model);
    dx = Buffer<bf16>(g.num_tokens * g.model);
    workspace = Buffer<std::uint8_t>(gate_workspace(g));
    fill(gate, 1.f / sqrtf(static_cast<float>(g.model)), seed + 21);
    fill(d_logits, 1.f, seed + 24);
  }
  void poison() {
    logits.poison(), d_gate.poison(), terms.poison(), dx.poison(), workspace.poison();
  }
  bool guards_intact() const {
    bool good = terms.guards_intact() && dx.guards_intact() && workspace.guards_intact();
    for (auto* b : {&logits, &d_logits, &d_gate}) good &= b->guards_intact();
    return good;
  }
  void forward(const bf16* x_TD, Stream stream) {
    MOESH_RUN(split_gate(config, gate.get(), terms.get(), stream));
    MOESH_RUN(gate_logits(config, x_TD, terms.get(), logits.get(), stream));
  }
  void backward(const bf16* x_TD, Stream stream) {
    MOESH_RUN(gate_backward(config, x_TD, terms.get(), d_logits.get(), workspace.get(),
                            d_gate.get(), dx.get(), stream));
  }
};

struct DeviceLayer {
  LayerConfig config;
  DeviceGate of_router;
  std::int64_t rows;  // capacity: T * K
  Buffer<bf16> x, dy, w1, w3, w2, b1, b3, b2;
  Buffer<std::int64_t> experts_TK;
  Buffer<std::int32_t> workspace, ends, order, token, inverse;
  Buffer<float> weight_TK, score, d_score_terms, d_score, bias_terms;
  Buffer<std::uint8_t> chunks;
  // rows_ is x, then dy, at their experts; one buffer would do for y_R and dx_R too, but a check
  // wants to see them
  Buffer<bf16> rows_, gate, up_, act, y_R, y, dx_R, dx_, dw1, dw3, dw2_, db1, db3, db2;

  DeviceLayer(const LayerConfig& c, std::uint64_t seed) : config(c), rows(c.tokens * c.top_k) {
    if (config.num_experts == 0) config.num_experts = c.experts;
    const std::int64_t e = config.num_experts, weights = e * c.model * c.ffn;
    const std::int64_t in = (c.gathered ? c.tokens : rows) * c.model;
    x = Buffer<bf16>(in), dy = Buffer<bf16>(in);
    w1 = Buffer<bf16>(weights), w3 = Buffer<bf16>(weights), w2 = Buffer<bf16>(weights);
    b1 = Buffer<bf16>(e * c.ffn), b3 = Buffer<bf16>(e * c.ffn), b2 = Buffer<bf16>(e * c.model);
    experts_TK = Buffer<std::int64_t>(rows), weight_TK = Buffer<float>(rows);
    ends = Buffer<std::int32_t>(e), order = Buffer<std::int32_t>(rows);
    token = Buffer<std::int32_t>(rows), inverse = Buffer<std::int32_t>(rows);
    workspace = Buffer<std::int32_t>(sort_workspace(sort_arguments()));
    score = Buffer<float>(rows), d_score = Buffer<float>(rows);
    d_score_terms = Buffer<float>(rows * num_score_terms(c.ffn));
    bias_terms = Buffer<float>(num_bias_terms(rows, e) * std::max(c.model, c.ffn));
    chunks = Buffer<std::uint8_t>(chunk_workspace(rows, c.model, c.ffn));
    gate = Buffer<bf16>(rows * c.ffn), up_ = Buffer<bf16>(rows * c.ffn);
    act = Buffer<bf16>(rows * c.ffn);
    rows_ = Buffer<bf16>(rows * c.model), y_R = Buffer<bf16>(rows * c.model);
    dx_R = Buffer<bf16>(rows * c.model);
    y = Buffer<bf16>(c.tokens * c.model), dx_ = Buffer<bf16>(c.tokens * c.model);
    dw1 = Buffer<bf16>(weights), dw3 = Buffer<bf16>(weights), dw2_ = Buffer<bf16>(weights);
    db1 = Buffer<bf16>(e * c.ffn), db3 = Buffer<bf16>(e * c.ffn), db2 = Buffer<bf16>(e * c.model);
    fill(x, 1.f, seed + 1), fill(dy, 1.f, seed + 2);
    const float narrow = 1.f / sqrtf(static_cast<float>(c.model));
    fill(w1, narrow, seed + 3), fill(w3, narrow, seed + 4);
    fill(w2, 1.f / sqrtf(static_cast<float>(c.ffn)), seed + 5);
    fill(b1, 0.5f, seed + 6), fill(b3, 0.5f, seed + 7), fill(b2, 0.5f, seed + 8);
    fill(weight_TK, 0.5f, seed + 9);
    if (c.gate)
      of_router =
          DeviceGate({.num_tokens = c.tokens, .model = c.model, .num_experts = c.experts}, seed);
  }

  /// Everything that is the same before each run: outputs and workspaces are NaN.
  void poison() {
    for (auto* b : {&workspace, &ends, &order, &token, &inverse}) b->poison();
    for (auto* b : {&score, &d_score_terms, &d_score, &bias_terms}) b->poison();
    for (auto* b : results()) b->poison();
    chunks.poison();
  }
  std::vector<Buffer<bf16>*> results() {
    return {&rows_, &gate, &up_, &act, &y_R, &y, &dx_R, &dx_, &dw1, &dw3, &dw2_, &db1, &db3, &db2};
  }
  bool guards_intact() {
    bool good = chunks.guards_intact() && experts_TK.guards_intact();
    for (auto* b : {&workspace, &ends, &order, &token, &inverse}) good &= b->guards_intact();
    for (auto* b : {&score, &d_score_terms, &d_score, &weight_TK, &bias_terms})
      good &= b->guards_intact();
    for (auto* b : results()) good &= b->guards_intact();
    return good;
  }

  Sort sort_arguments() const {
    return {.experts_TK = experts_TK.get(),
            .all_experts = config.experts,
            .weight_TK = weight_TK.get(),
            .num_tokens = config.tokens,
            .top_k = config.top_k,
            .first_expert = config.first_expert,
            .num_experts = config.num_experts,
            .workspace = workspace.get(),
            .ends_E = ends.get(),
            .order_R = order.get(),
            .token_R = token.get(),
            .inverse_TK = inverse.get(),
            .score_R = score.get()};
  }
  GroupedExperts experts() const {
    const bool b = config.biases;
    return {.num_rows = rows,
            .model = config.model,
            .ffn = config.ffn,
            .num_experts = config.num_experts,
            .ends_E = ends.get(),
            .score_R = config.scores ? score.get() : nullptr,
            .score_before = config.before,
            .clamped = config.clamped,
            .w1_EFD = w1.get(),
            .w3_EFD = w3.get(),
            .w2_EDF = w2.get(),
            .b1_EF = b ? b1.get() : nullptr,
            .b3_EF = b ? b3.get() : nullptr,
            .b2_ED = b ? b2.get() : nullptr};
  }

  /// x or dy at the experts.
  const bf16* at_experts(const Buffer<bf16>& from, Stream stream) {
    if (!config.gathered) return from.get();
    MOESH_RUN(expand(from.get(), inverse.get(), rows_.get(), config.tokens, config.top_k,
                     config.model, stream));
    return rows_.get();
  }
  void forward(Stream stream) {
    if (config.gate) of_router.forward(x.get(), stream);
    MOESH_RUN(sort(sort_arguments(), stream));
    const GroupedExperts e = experts();
    const bf16* x_R = at_experts(x, stream);
    MOESH_RUN(up(e, x_R, gate.get(), up_.get(), act.get(), stream));
    MOESH_RUN(down(e, act.get(), y_R.get(), stream));
    MOESH_RUN(combine(y_R.get(), inverse.get(), nullptr, y.get(), config.tokens, config.top_k,
                      config.model, stream));
  }
  void backward(Stream stream) {
    const GroupedExperts e = experts();
    const bf16* dy_R = at_experts(dy, stream);
    MOESH_RUN(dh(e, dy_R, gate.get(), up_.get(), act.get(),
                 config.scores ? d_score_terms.get() : nullptr, stream));
    if (config.scores)
      MOESH_RUN(score_gradient(e, dy_R, d_score_terms.get(), d_score.get(), stream));
    MOESH_RUN(dw2(e, dy_R, act.get(), dw2_.get(), chunks.get(), stream));
    if (config.biases)
      MOESH_RUN(bias_gradients(e, dy_R, gate.get(), up_.get(), bias_terms.get(), db1.get(),
                               db3.get(), db2.get(), stream));
    MOESH_RUN(dx(e, gate.get(), up_.get(), dx_R.get(), stream));
    if (config.gate) of_router.backward(x.get(), stream);
    const bf16* dx_of_router = config.gate ? of_router.dx.get() : nullptr;
    MOESH_RUN(combine(dx_R.get(), inverse.get(), dx_of_router, dx_.get(), config.tokens,
                      config.top_k, config.model, stream));
    const bf16* x_R = at_experts(x, stream);
    MOESH_RUN(dw13(e, x_R, gate.get(), up_.get(), dw1.get(), dw3.get(), chunks.get(), stream));
  }
};

}  // namespace moesh::kernels::cuda
