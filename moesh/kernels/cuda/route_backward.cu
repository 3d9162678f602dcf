// The router's gradients. d(logits) is split into two bf16 terms, so that both products run on the
// tensor cores and keep about 16 bits: d(gate) = d(logits)' x, over tokens in a few parts that are
// added up in order, and dx = d(logits) gate, which is `dx` of one expert whose F is the terms.
// T tokens, D model, E experts (P: in a multiple of 8), K top-k

#include "moesh/kernels/cuda/host.h"
#include "moesh/kernels/cuda/thin.h"

namespace moesh::kernels::cuda {
namespace {

using ptx::bf16;

constexpr unsigned kAll = ~0u;
constexpr int kWarps = 8, kMaxParts = 16, kBiasParts = 64;

/// Where things lie in the workspace.
struct Layout {
  int padded, num_parts, steps_of_part;
  std::int64_t terms, d_gate, d_bias, ends, size;  // bytes

  explicit Layout(const Router& r) {
    const auto after = [&](std::int64_t bytes) {
      const std::int64_t at = size;
      size = (size + bytes + 255) / 256 * 256;
      return at;
    };
    const int steps = ceil_div(static_cast<int>(r.num_tokens), kTileK);
    const int tiles = ceil_div(static_cast<int>(r.model), kTileM);
    padded = static_cast<int>(padded_experts(r.num_experts));
    num_parts = smaller(kMaxParts, ceil_div(128, tiles));  // enough blocks for a GPU
    steps_of_part = ceil_div(steps, num_parts);
    size = 0;
    terms = after(r.num_tokens * 3 * padded * 2);
    d_gate = after(num_parts * r.model * padded * 4);
    d_bias = after(kBiasParts * padded * 4);
    ends = after(4);
  }
};

struct LogitsParams {
  Router router;
  RouteGradients g;
  bf16* terms;  // [T, 3 P]: high, high, low
  int* ends;    // of the one expert of dx
  int padded;
};

__device__ __forceinline__ float warp_sum(float v) {
  for (int distance = 1; distance < 32; distance *= 2) v += __shfl_xor_sync(kAll, v, distance);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
  for (int distance = 1; distance < 32; distance *= 2)
    v = fmaxf(v, __shfl_xor_sync(kAll, v, distance));
  return v;
}

/// A warp per token: from the gradient of its weights to that of its logits. Lane i has experts i,
/// i + 32, ...; lane k has choice k.
template <int kPer>
__global__ void __launch_bounds__(kWarps * 32) logits_kernel(const LogitsParams p) {
  const Router& r = p.router;
  const int token = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.ends = static_cast<int>(r.num_tokens);
  if (token >= r.num_tokens) return;
  const int num_experts = static_cast<int>(r.num_experts), top_k = static_cast<int>(r.top_k);
  const float* logits = p.g.logits_TE + static_cast<int64_t>(token) * num_experts;
  const int64_t at = static_cast<int64_t>(token) * top_k + lane;
  const bool mine = lane < top_k;
  const int expert = mine ? p.g.experts_TK[at] : -1;
  float d = 0.f, raw = 0.f;  // of this lane's choice: gradient of the weight, then of the score
  if (mine) {
    const int64_t place = p.g.inverse_TK ? p.g.inverse_TK[at] : at;
    d = place >= 0 ? r.scale * p.g.d_weights[place] : 0.f;
    raw = logits[expert];
  }
  float score[kPer] = {};
  if (r.scoring == Scoring::sigmoid) {
    raw = mine ? 1.f / (1.f + expf(-raw)) : 0.f;
  } else if (r.scoring == Scoring::softmax_chosen) {
    const float largest = warp_max(mine ? raw : -INFINITY);
    raw = mine ? expf(raw - largest) : 0.f;
    raw /= warp_sum(raw);
  } else {
    float largest = -INFINITY, sum = 0.f;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      score[j] = j * 32 + lane < num_experts ? logits[j * 32 + lane] : -INFINITY;
      largest = fmaxf(largest, score[j]);
    }
    largest = warp_max(largest);
#pragma unroll
    for (int j = 0; j < kPer; ++j) sum += score[j] = expf(score[j] - largest);
    sum = warp_sum(sum);
#pragma unroll
    for (int j = 0; j < kPer; ++j) score[j] /= sum;
    raw = mine ? expf(raw - largest) / sum : 0.f;
  }
  if (r.normalize) {  // w = raw / (sum + epsilon)
    const float sum = warp_sum(raw) + r.epsilon;
    d = (d - warp_sum(d * raw) / sum) / sum;
    if (!mine) d = 0.f;
  }
  float all = 0.f;  // softmax over all: every expert gets a part
  if (r.scoring == Scoring::sigmoid)
    d *= raw * (1.f - raw);
  else if (r.scoring == Scoring::softmax_chosen)
    d = raw * (d - warp_sum(d * raw));
  else
    all = warp_sum(d * raw), d *= raw;
  float result[kPer];
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int e = j * 32 + lane;
    result[j] = -all * score[j];
    if (p.g.d_logits_TE && e < num_experts)
      result[j] += p.g.d_logits_TE[static_cast<int64_t>(token) * num_experts + e];
  }
  for (int k = 0; k < top_k; ++k) {
    const int e = __shfl_sync(kAll, expert, k);
    const float value = __shfl_sync(kAll, d, k);
#pragma unroll
    for (int j = 0; j < kPer; ++j)
      if (e == j * 32 + lane) result[j] += value;
  }
  bf16* terms = p.terms + static_cast<int64_t>(token) * 3 * p.padded;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int e = j * 32 + lane;
    if (e >= p.padded) continue;
    if (e >= num_experts) result[j] = 0.f;
    const bf16 high = __float2bfloat16(result[j]);
    terms[e] = terms[p.padded + e] = high;
    terms[2 * p.padded + e] = __float2bfloat16(result[j] - __bfloat162float(high));
  }
}

struct GateParams {
  thin::Operands operands;
  float* parts;  // [parts, D, P]
  int model, padded, num_steps, steps_of_part;
};

/// A block has 128 of D, one part of the tokens and kN of the experts.
template <int kN>
__global__ void __launch_bounds__(thin::kThreads, 1)
    gate_kernel(const __grid_constant__ GateParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const int m = blockIdx.x * kTileM, first = blockIdx.y * p.steps_of_part, n = blockIdx.z * kN;
  float acc[kN / 2];
  thin::multiply<kN, 2, true>(p.operands, memory, m, n, first,
                              min(p.num_steps, first + p.steps_of_part), acc);
  if (threadIdx.x >= thin::kMathThreads) return;
  float* out = p.parts + static_cast<int64_t>(blockIdx.y) * p.model * p.padded;
  thin::each_result<kN>(acc, [&](int row, int column, float value) {
    if (m + row < p.model && n + column < p.padded)
      out[static_cast<int64_t>(m + row) * p.padded + n + column] = value;
  });
}

/// d(gate) [E, D] from the parts, in order.
__global__ void sum_parts(const float* parts, float* d_gate_ED, int num_parts, int64_t model,
                          int padded, int num_experts) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t d = i / padded, e = i % padded;
  if (d >= model || e >= num_experts) return;
  float sum = 0.f;
  for (int part = 0; part < num_parts; ++part) sum += parts[part * model * padded + i];
  d_gate_ED[e * model + d] = sum;
}

/// The sum of d(logits) over each of kBiasParts parts of the tokens.
__global__ void sum_tokens(const bf16* terms, float* parts, int64_t num_tokens, int padded) {
  const int64_t size = (num_tokens + kBiasParts - 1) / kBiasParts, first = blockIdx.x * size;
  for (int e = threadIdx.x; e < padded; e += blockDim.x) {
    float sum = 0.f;
    for (int64_t t = first; t < min(num_tokens, first + size); ++t) {
      const bf16* row = terms + t * 3 * padded + e;
      sum += __bfloat162float(row[0]) + __bfloat162float(row[2 * padded]);
    }
    parts[blockIdx.x * padded + e] = sum;
  }
}
__global__ void sum_bias_parts(const float* parts, float* d_bias_E, int padded, int num_experts) {
  const int e = threadIdx.x;
  if (e >= num_experts) return;
  float sum = 0.f;
  for (int part = 0; part < kBiasParts; ++part) sum += parts[part * padded + e];
  d_bias_E[e] = sum;
}

template <int kN, int kPer>
Error launch(const LogitsParams& l, const GateParams& g, const Layout& layout,
             cudaStream_t stream) {
  static Prepared prepared;
  constexpr int kBytes = thin::Shape<kN, 2>::kBytes;
  int ignored = 0;
  if (Error error = prepared(gate_kernel<kN>, thin::kThreads, kBytes, 1, ignored)) return error;
  const int tokens = static_cast<int>(l.router.num_tokens);
  logits_kernel<kPer><<<ceil_div(tokens, kWarps), kWarps * 32, 0, stream>>>(l);
  const dim3 grid(ceil_div(g.model, kTileM), layout.num_parts, ceil_div(layout.padded, kN));
  gate_kernel<kN><<<grid, thin::kThreads, kBytes, stream>>>(g);
  return text_of(cudaGetLastError());
}

}  // namespace

std::int64_t route_workspace(const Router& r) { return Layout(r).size; }

Error route_backward(const Router& r, const RouteGradients& g, Stream stream) {
  if (r.model % 8 != 0) return "model is to be a multiple of 8";
  if (r.num_experts < 1 || r.num_experts > 256) return "routed experts are to be 1 to 256";
  const auto queue = static_cast<cudaStream_t>(stream);
  if (r.num_tokens == 0) {
    Error error =
        text_of(cudaMemsetAsync(g.d_gate_ED, 0, r.num_experts * r.model * sizeof(float), queue));
    if (!error && g.d_gate_bias_E)
      error = text_of(cudaMemsetAsync(g.d_gate_bias_E, 0, r.num_experts * sizeof(float), queue));
    return error;
  }
  const Layout layout(r);
  auto* base = static_cast<std::uint8_t*>(g.workspace);
  auto* terms = reinterpret_cast<bf16*>(base + layout.terms);
  auto* parts = reinterpret_cast<float*>(base + layout.d_gate);
  auto* bias_parts = reinterpret_cast<float*>(base + layout.d_bias);
  auto* ends = reinterpret_cast<int*>(base + layout.ends);
  const LogitsParams l{r, g, terms, ends, layout.padded};
  GateParams p = {};
  Error error = nullptr;
  p.operands.a = tensor_map(g.x_TD, r.model, r.num_tokens, 1, 64, kTileK, error);
  if (!error)
    p.operands.b = tensor_map(terms, 3 * layout.padded, r.num_tokens, 1, 64, kTileK, error);
  if (error) return error;
  p.operands.term_columns[0] = 0, p.operands.term_columns[1] = 2 * layout.padded;
  p.parts = parts;
  p.model = static_cast<int>(r.model), p.padded = layout.padded;
  p.num_steps = ceil_div(static_cast<int>(r.num_tokens), kTileK);
  p.steps_of_part = layout.steps_of_part;
  error = r.num_experts <= 64    ? launch<64, 2>(l, p, layout, queue)
          : r.num_experts <= 128 ? launch<128, 4>(l, p, layout, queue)
                                 : launch<128, 8>(l, p, layout, queue);
  if (error) return error;
  sum_parts<<<static_cast<unsigned>((r.model * layout.padded + 255) / 256), 256, 0, queue>>>(
      parts, g.d_gate_ED, layout.num_parts, r.model, layout.padded,
      static_cast<int>(r.num_experts));
  if (g.d_gate_bias_E) {
    sum_tokens<<<kBiasParts, 256, 0, queue>>>(terms, bias_parts, r.num_tokens, layout.padded);
    sum_bias_parts<<<1, 256, 0, queue>>>(bias_parts, g.d_gate_bias_E, layout.padded,
                                         static_cast<int>(r.num_experts));
  }
  if ((error = text_of(cudaGetLastError()))) return error;
  // The gate's terms middle, high, high as W1 of one expert, [3 P, D].
  const Experts one{.num_rows = r.num_tokens,
                    .model = r.model,
                    .ffn = 3 * layout.padded,
                    .num_experts = 1,
                    .ends_E = ends,
                    .score_R = nullptr,
                    .w1_EFD = static_cast<const bf16*>(g.terms) + layout.padded * r.model,
                    .w3_EFD = nullptr,
                    .w2_EDF = nullptr};
  return dx(one, terms, nullptr, g.dx_TD, stream);
}

}  // namespace moesh::kernels::cuda
