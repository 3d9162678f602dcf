// The router's choice: logits on the tensor cores, exact to float32 rounding as the gate is a sum
// of three bf16 terms; scores, groups and top-k by a warp per token. T tokens, D model, E experts,
// K top-k

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

struct RouteParams {
  thin::Operands operands;
  Router router;
  float* logits_TE;
  int* experts_TK;
  float* weights_TK;
  int* bad_token;
};

constexpr unsigned kAll = ~0u;

/// Ordered as the floats are; 0 is below all of them. A NaN is above: it is chosen, and so reaches
/// the loss.
__device__ __forceinline__ unsigned key_of(float value) {
  if (isnan(value)) return 0xFFFFFFFFu;
  const unsigned bits = __float_as_uint(value + 0.f);  // -0 is 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}
__device__ __forceinline__ float warp_sum(float v) {
  for (int distance = 1; distance < 32; distance *= 2) v += __shfl_xor_sync(kAll, v, distance);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
  for (int distance = 1; distance < 32; distance *= 2)
    v = fmaxf(v, __shfl_xor_sync(kAll, v, distance));
  return v;
}

/// A warp has one token; lane i has experts i, i + 32, ...
template <int kPer>
struct Choice {
  unsigned keys[kPer];

  /// The expert with the largest key, the lowest of equals; it is taken out.
  __device__ __forceinline__ int take(int lane, unsigned& best) {
    unsigned mine = 0;
    int where = 0;
#pragma unroll
    for (int j = 0; j < kPer; ++j)
      if (keys[j] > mine) mine = keys[j], where = j;
    best = __reduce_max_sync(kAll, mine);
    const unsigned expert =
        __reduce_min_sync(kAll, mine == best ? static_cast<unsigned>(where * 32 + lane) : kAll);
#pragma unroll
    for (int j = 0; j < kPer; ++j)
      if (expert == static_cast<unsigned>(j * 32 + lane)) keys[j] = 0;
    return static_cast<int>(expert);
  }
};

/// Node-limited routing: what is not in one of the best groups, by the sum of their best two, is
/// -inf.
template <int kPer>
__device__ __forceinline__ void limit_to_groups(Choice<kPer>& choice, const Router& r, int lane) {
  const int num_groups = static_cast<int>(r.num_groups);
  const int size = static_cast<int>(r.num_experts) / num_groups;
  Choice<1> groups = {0};
  for (int group = 0; group < num_groups; ++group) {
    Choice<kPer> inside;
#pragma unroll
    for (int j = 0; j < kPer; ++j)
      inside.keys[j] = (j * 32 + lane) / size == group ? choice.keys[j] : 0;
    unsigned first, second;
    inside.take(lane, first), inside.take(lane, second);
    if (lane == group) groups.keys[0] = key_of(value_of(first) + value_of(second));
  }
  unsigned kept = 0, ignored;
  for (int i = 0; i < r.top_groups; ++i) kept |= 1u << groups.take(lane, ignored);
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int expert = j * 32 + lane;
    if (expert < r.num_experts && !(kept >> (expert / size) & 1))
      choice.keys[j] = key_of(-INFINITY);
  }
}

/// Logits of the first 128 experts, and of the next.
template <int kPer>
__device__ void choose(const RouteParams& p, const float* first, const float* second, int token,
                       int lane) {
  const Router& r = p.router;
  const int num_experts = static_cast<int>(r.num_experts), top_k = static_cast<int>(r.top_k);
  float logit[kPer], score[kPer];
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int e = j * 32 + lane;
    logit[j] = -INFINITY;
    if (e >= num_experts) continue;
    logit[j] = (j < 4 ? first[e] : second[e - 128]) + (r.gate_bias_E ? r.gate_bias_E[e] : 0.f);
    if (p.logits_TE) p.logits_TE[static_cast<int64_t>(token) * num_experts + e] = logit[j];
  }
  if (!p.experts_TK) return;
  if (r.scoring == Scoring::sigmoid) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) score[j] = 1.f / (1.f + expf(-logit[j]));
  } else if (r.scoring == Scoring::softmax) {
    float largest = -INFINITY, sum = 0.f;
#pragma unroll
    for (int j = 0; j < kPer; ++j) largest = fmaxf(largest, logit[j]);
    largest = warp_max(largest);
#pragma unroll
    for (int j = 0; j < kPer; ++j) sum += score[j] = expf(logit[j] - largest);
    sum = warp_sum(sum);
#pragma unroll
    for (int j = 0; j < kPer; ++j) score[j] /= sum;
  } else {
#pragma unroll
    for (int j = 0; j < kPer; ++j) score[j] = logit[j];
  }
  Choice<kPer> choice;
  bool bad = false;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int e = j * 32 + lane;
    choice.keys[j] = 0;
    if (e >= num_experts) continue;
    const float value =
        (r.choose_on_logits ? logit[j] : score[j]) + (r.expert_bias_E ? r.expert_bias_E[e] : 0.f);
    bad |= isnan(value);
    choice.keys[j] = key_of(value);
  }
  if (__any_sync(kAll, bad) && lane == 0 && p.bad_token) atomicMin(p.bad_token, token);
  if (r.num_groups > 1) limit_to_groups(choice, r, lane);

  int expert = 0;  // lane k has choice k
  float weight = 0.f;
  for (int k = 0; k < top_k; ++k) {
    unsigned ignored;
    const int e = choice.take(lane, ignored);
    float value = 0.f;
#pragma unroll
    for (int j = 0; j < kPer; ++j)
      if (e == j * 32 + lane) value = score[j];
    value = __shfl_sync(kAll, value, e % 32);
    if (lane == k) expert = e, weight = value;
  }
  const bool mine = lane < top_k;
  if (r.scoring == Scoring::softmax_chosen) {
    const float largest = warp_max(mine ? weight : -INFINITY);
    weight = mine ? expf(weight - largest) : 0.f;
    weight /= warp_sum(weight);
  }
  if (!mine) weight = 0.f;
  if (r.normalize) weight /= warp_sum(weight) + r.epsilon;
  if (!mine) return;
  const int64_t at = static_cast<int64_t>(token) * top_k + lane;
  p.experts_TK[at] = expert;
  p.weights_TK[at] = weight * r.scale;
}

/// 256 columns are two passes over x; the logits of the first lie behind the stages of the second.
template <int kN>
struct RouteShape {
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
    route_kernel(const __grid_constant__ RouteParams p) {
  using S = RouteShape<kN>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const int first_token = blockIdx.x * kTileM, num_tokens = static_cast<int>(p.router.num_tokens);
  const int steps = ceil_div(static_cast<int>(p.router.model), kTileK);
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
  for (int row = threadIdx.x / 32; row < kTileM; row += thin::kThreads / 32) {
    if (first_token + row >= num_tokens) break;
    choose<kN / 32>(p, first + row * S::kPitch, second + row * S::kPitch, first_token + row,
                    threadIdx.x % 32);
  }
}

/// A warp per token; largest first.
template <int kPer>
__global__ void __launch_bounds__(256)
    top_k_kernel(const float* scores_TE, int num_tokens, int num_experts, int k, float* values_TK,
                 int64_t* experts_TK, int* bad_token) {
  const int token = (blockIdx.x * 256 + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (token >= num_tokens) return;
  Choice<kPer> choice;
  bool bad = false;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int e = j * 32 + lane;
    choice.keys[j] = 0;
    if (e >= num_experts) continue;
    const float value = scores_TE[static_cast<int64_t>(token) * num_experts + e];
    bad |= isnan(value);
    choice.keys[j] = key_of(value);
  }
  if (__any_sync(kAll, bad) && lane == 0 && bad_token) atomicMin(bad_token, token);
  for (int i = 0; i < k; ++i) {
    unsigned key;
    const int expert = choice.take(lane, key);
    if (lane > 0) continue;
    experts_TK[static_cast<int64_t>(token) * k + i] = expert;
    values_TK[static_cast<int64_t>(token) * k + i] = value_of(key);
  }
}

template <int kN>
Error launch(const RouteParams& p, cudaStream_t stream) {
  static Prepared prepared;
  constexpr int kBytes = RouteShape<kN>::kBytes;
  int num_blocks = 0;
  if (Error error = prepared(route_kernel<kN>, thin::kThreads, kBytes, 1, num_blocks)) return error;
  num_blocks = ceil_div(static_cast<int>(p.router.num_tokens), kTileM);
  route_kernel<kN><<<num_blocks, thin::kThreads, kBytes, stream>>>(p);
  return text_of(cudaGetLastError());
}

}  // namespace

Error split_gate(const Router& r, const float* gate_ED, void* terms, Stream stream) {
  split_gate_kernel<<<256, 256, 0, static_cast<cudaStream_t>(stream)>>>(
      gate_ED, static_cast<bf16*>(terms), static_cast<int>(r.num_experts),
      static_cast<int>(padded_experts(r.num_experts)), r.model);
  return text_of(cudaGetLastError());
}

Error route(const Router& r, const void* x_TD, const void* terms, float* logits_TE,
            std::int32_t* experts_TK, float* weights_TK, std::int32_t* bad_token, Stream stream) {
  if (r.model % 8 != 0) return "model is to be a multiple of 8";
  if (r.num_experts < 1 || r.num_experts > 256) return "routed experts are to be 1 to 256";
  if (experts_TK && (r.top_k < 1 || r.top_k > 16 || r.top_k > r.num_experts))
    return "top_k is to be 1 to 16";
  if (r.num_groups < 1 || r.num_groups > 32) return "groups of experts are to be 1 to 32";
  if (r.num_tokens == 0) return nullptr;
  const std::int64_t padded = padded_experts(r.num_experts);
  const int columns = r.num_experts <= 64 ? 64 : r.num_experts <= 128 ? 128 : 256;
  Error error = nullptr;
  RouteParams p = {};
  p.operands.a = tensor_map(x_TD, r.model, r.num_tokens, 1, kTileK, kTileM, error);
  if (!error)
    p.operands.b = tensor_map(terms, r.model, padded, 4, kTileK, smaller(columns, 128), error);
  if (error) return error;
  p.router = r;
  p.logits_TE = logits_TE, p.experts_TK = experts_TK, p.weights_TK = weights_TK;
  p.bad_token = bad_token;
  const auto queue = static_cast<cudaStream_t>(stream);
  return columns == 64    ? launch<64>(p, queue)
         : columns == 128 ? launch<128>(p, queue)
                          : launch<256>(p, queue);
}

Error top_k(const float* scores_TE, std::int64_t num_tokens, std::int64_t num_experts,
            std::int64_t k, float* values_TK, std::int64_t* experts_TK, std::int32_t* bad_token,
            Stream stream) {
  if (num_experts < 1 || num_experts > 256) return "routed experts are to be 1 to 256";
  if (k < 1 || k > num_experts) return "k is to be 1 to the number of experts";
  if (num_tokens == 0) return nullptr;
  const auto run = [&](auto kernel) {
    kernel<<<static_cast<unsigned>((num_tokens + 7) / 8), 256, 0,
             static_cast<cudaStream_t>(stream)>>>(
        scores_TE, static_cast<int>(num_tokens), static_cast<int>(num_experts), static_cast<int>(k),
        values_TK, experts_TK, bad_token);
  };
  num_experts <= 64    ? run(top_k_kernel<2>)
  : num_experts <= 128 ? run(top_k_kernel<4>)
                       : run(top_k_kernel<8>);
  return text_of(cudaGetLastError());
}

}  // namespace moesh::kernels::cuda
