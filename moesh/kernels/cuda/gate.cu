// The router's logits and their gradients, on the tensor cores. The gate is a sum of three bf16
// terms, so that logits are exact to float32 rounding. d(logits) is split into two bf16 terms,
// which keep about 16 bits: d(gate) = d(logits)' x, over tokens in a few parts that are added up in
// order, and dx = d(logits) gate, which is `dx` of one expert whose F is the terms. T tokens, D
// model, E experts (P: in a multiple of 8)

#include "moesh/kernels/cuda/host.h"
#include "moesh/kernels/cuda/thin.h"

namespace moesh::kernels::cuda {
namespace {

using ptx::bf16;

__global__ void split_gate_kernel(const float* gate_ED, bf16* terms, int num_experts, int padded,
                                  int64_t model) {
  const int64_t size = padded * model;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < size;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    float rest = i < num_experts * model ? gate_ED[i] : 0.f;
    for (int term = 2; term >= 0; --term) {
      const bf16 value = __float2bfloat16(rest);
      terms[term * size + i] = value;
      if (term == 2) terms[3 * size + i] = value;
      rest -= __bfloat162float(value);
    }
  }
}

struct LogitsParams {
  thin::Operands operands;
  Gate gate;
  float* logits_TE;
};

/// 256 columns are two passes over x; the logits of the first lie behind the stages of the second.
template <int kN>
struct LogitsShape {
  static constexpr int kWidth = smaller(kN, 128), kPasses = kN / kWidth, kPitch = kWidth + 4;
  static constexpr int kMostStages = kPasses == 1 ? 4 : 2;
  static constexpr int kStageBytes = thin::Shape<kWidth, 3, kMostStages>::kBytes;
  static constexpr int kFirst = kPasses == 1 ? 0 : (kStageBytes + 15) / 16 * 16;  // pass 0's logits
  static constexpr int kLogitBytes = kTileM * kPitch * 4;
  static constexpr int kBytes = kPasses == 1 ? kStageBytes : kFirst + kLogitBytes;
  static_assert(kStageBytes >= kLogitBytes && kBytes <= 227 * 1024);
};

template <int kN>
__global__ void __launch_bounds__(thin::kThreads, 1)
    logits_kernel(const __grid_constant__ LogitsParams p) {
  using S = LogitsShape<kN>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const int first_token = blockIdx.x * kTileM, num_tokens = static_cast<int>(p.gate.num_tokens);
  const int steps = ceil_div(static_cast<int>(p.gate.model), kTileK);
  float* first = reinterpret_cast<float*>(memory + S::kFirst);
  float* second = reinterpret_cast<float*>(memory);
#pragma unroll 1
  for (int pass = 0; pass < S::kPasses; ++pass) {
    float acc[S::kWidth / 2];
    thin::multiply<S::kWidth, 3, false, S::kMostStages>(p.operands, memory, first_token,
                                                        pass * S::kWidth, 0, steps, acc);
    __syncthreads();
    float* logits = pass == 0 ? first : second;
    if (threadIdx.x < thin::kMathThreads)
      thin::each_result<S::kWidth>(
          acc, [&](int row, int column, float value) { logits[row * S::kPitch + column] = value; });
    __syncthreads();
  }
  // A warp writes the logits of a token.
  const int num_experts = static_cast<int>(p.gate.num_experts), lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < kTileM; row += thin::kThreads / 32) {
    if (first_token + row >= num_tokens) break;
    float* out = p.logits_TE + static_cast<int64_t>(first_token + row) * num_experts;
#pragma unroll
    for (int j = 0; j < kN / 32; ++j) {
      const int e = j * 32 + lane;
      if (e < num_experts)
        out[e] = j < 4 ? first[row * S::kPitch + e] : second[row * S::kPitch + e - 128];
    }
  }
}

template <int kN>
Error launch_logits(const LogitsParams& p, cudaStream_t stream) {
  static Prepared prepared;
  constexpr int kBytes = LogitsShape<kN>::kBytes;
  int num_blocks = 0;
  if (Error error = prepared(logits_kernel<kN>, thin::kThreads, kBytes, 1, num_blocks))
    return error;
  num_blocks = ceil_div(static_cast<int>(p.gate.num_tokens), kTileM);
  logits_kernel<kN><<<num_blocks, thin::kThreads, kBytes, stream>>>(p);
  return text_of(cudaGetLastError());
}

// ---- backward ----

constexpr int kMaxParts = 16;

/// Where things lie in the workspace.
struct Layout {
  int padded, num_parts, steps_of_part;
  std::int64_t terms, d_gate, ends, size;  // bytes

  explicit Layout(const Gate& g) {
    const auto after = [&](std::int64_t bytes) {
      const std::int64_t at = size;
      size = (size + bytes + 255) / 256 * 256;
      return at;
    };
    const int steps = ceil_div(static_cast<int>(g.num_tokens), kTileK);
    const int tiles = ceil_div(static_cast<int>(g.model), kTileM);
    padded = static_cast<int>(padded_experts(g.num_experts));
    num_parts = smaller(kMaxParts, ceil_div(128, tiles));  // enough blocks for a GPU
    steps_of_part = ceil_div(steps, num_parts);
    size = 0;
    terms = after(g.num_tokens * 3 * padded * 2);
    d_gate = after(num_parts * g.model * padded * 4);
    ends = after(4);
  }
};

/// d(logits) as terms [T, 3 P]: high, high, low.
__global__ void __launch_bounds__(256)
    split_logits_kernel(const float* d_logits_TE, bf16* terms, int* ends, int64_t num_tokens,
                        int num_experts, int padded) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x, token = i / padded;
  if (i == 0) *ends = static_cast<int>(num_tokens);  // of the one expert of dx
  if (token >= num_tokens) return;
  const int e = static_cast<int>(i % padded);
  const float value = e < num_experts ? d_logits_TE[token * num_experts + e] : 0.f;
  const bf16 high = __float2bfloat16(value);
  bf16* row = terms + token * 3 * padded;
  row[e] = row[padded + e] = high;
  row[2 * padded + e] = __float2bfloat16(value - __bfloat162float(high));
}

struct ProductParams {
  thin::Operands operands;
  float* parts;  // [parts, D, P]
  int model, padded, num_steps, steps_of_part;
};

/// A block has 128 of D, one part of the tokens and kN of the experts.
template <int kN>
__global__ void __launch_bounds__(thin::kThreads, 1)
    product_kernel(const __grid_constant__ ProductParams p) {
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

template <int kN>
Error launch_product(const ProductParams& p, const Layout& layout, cudaStream_t stream) {
  static Prepared prepared;
  constexpr int kBytes = thin::Shape<kN, 2>::kBytes;
  int ignored = 0;
  if (Error error = prepared(product_kernel<kN>, thin::kThreads, kBytes, 1, ignored)) return error;
  const dim3 grid(ceil_div(p.model, kTileM), layout.num_parts, ceil_div(layout.padded, kN));
  product_kernel<kN><<<grid, thin::kThreads, kBytes, stream>>>(p);
  return text_of(cudaGetLastError());
}

Error check(const Gate& g) {
  if (g.model % 8 != 0) return "model is to be a multiple of 8";
  if (g.num_experts < 1 || g.num_experts > 256) return "routed experts are to be 1 to 256";
  return nullptr;
}

}  // namespace

Error split_gate(const Gate& g, const float* gate_ED, void* terms, Stream stream) {
  return launch(stream, split_gate_kernel, 256, 256, gate_ED, terms, g.num_experts,
                padded_experts(g.num_experts), g.model);
}

Error gate_logits(const Gate& g, const void* x_TD, const void* terms, float* logits_TE,
                  Stream stream) {
  if (Error error = check(g)) return error;
  if (g.num_tokens == 0) return nullptr;
  const std::int64_t padded = padded_experts(g.num_experts);
  const int columns = g.num_experts <= 64 ? 64 : g.num_experts <= 128 ? 128 : 256;
  Error error = nullptr;
  LogitsParams p = {};
  p.operands.a = tensor_map(x_TD, g.model, g.num_tokens, 1, kTileK, kTileM, error);
  if (!error)
    p.operands.b = tensor_map(terms, g.model, padded, 4, kTileK, smaller(columns, 128), error);
  if (error) return error;
  p.gate = g, p.logits_TE = logits_TE;
  const auto queue = static_cast<cudaStream_t>(stream);
  return columns == 64    ? launch_logits<64>(p, queue)
         : columns == 128 ? launch_logits<128>(p, queue)
                          : launch_logits<256>(p, queue);
}

std::int64_t gate_workspace(const Gate& g) { return Layout(g).size; }

Error gate_backward(const Gate& g, const void* x_TD, const void* gate_terms,
                    const float* d_logits_TE, void* workspace, float* d_gate_ED, void* dx_TD,
                    Stream stream) {
  if (Error error = check(g)) return error;
  const auto queue = static_cast<cudaStream_t>(stream);
  if (g.num_tokens == 0)
    return text_of(cudaMemsetAsync(d_gate_ED, 0, g.num_experts * g.model * sizeof(float), queue));
  const Layout layout(g);
  auto* base = static_cast<std::uint8_t*>(workspace);
  auto* terms = reinterpret_cast<bf16*>(base + layout.terms);
  auto* ends = reinterpret_cast<int*>(base + layout.ends);
  const auto num_experts = static_cast<int>(g.num_experts);
  ProductParams p = {};
  Error error = nullptr;
  p.operands.a = tensor_map(x_TD, g.model, g.num_tokens, 1, 64, kTileK, error);
  if (!error)
    p.operands.b = tensor_map(terms, 3 * layout.padded, g.num_tokens, 1, 64, kTileK, error);
  if (error) return error;
  p.operands.term_columns[0] = 0, p.operands.term_columns[1] = 2 * layout.padded;
  p.parts = reinterpret_cast<float*>(base + layout.d_gate);
  p.model = static_cast<int>(g.model), p.padded = layout.padded;
  p.num_steps = ceil_div(static_cast<int>(g.num_tokens), kTileK);
  p.steps_of_part = layout.steps_of_part;
  error = launch(stream, split_logits_kernel, blocks_for(g.num_tokens * layout.padded, 256), 256,
                 d_logits_TE, terms, ends, g.num_tokens, num_experts, layout.padded);
  if (error) return error;
  error = g.num_experts <= 64 ? launch_product<64>(p, layout, queue)
                              : launch_product<128>(p, layout, queue);
  if (error) return error;
  error = launch(stream, sum_parts, blocks_for(g.model * layout.padded, 256), 256, p.parts,
                 d_gate_ED, layout.num_parts, g.model, layout.padded, num_experts);
  if (error || !dx_TD) return error;
  // The gate's terms middle, high, high as W1 of one expert, [3 P, D].
  const GroupedExperts one{.num_rows = g.num_tokens,
                           .model = g.model,
                           .ffn = 3 * layout.padded,
                           .num_experts = 1,
                           .ends_E = ends,
                           .score_R = nullptr,
                           .w1_EFD = static_cast<const bf16*>(gate_terms) + layout.padded * g.model,
                           .w3_EFD = nullptr,
                           .w2_EDF = nullptr};
  return dx(one, terms, nullptr, dx_TD, stream);
}

}  // namespace moesh::kernels::cuda
