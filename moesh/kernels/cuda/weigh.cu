// What a router makes of its logits besides the choice: the weights of the chosen experts, the sums
// that a balance loss compares, and how often experts were chosen. A warp has a token, lane i its
// experts i, i + 32, .. and its choice i. T tokens, E experts, K top-k, B sequences

#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/host.h"

namespace moesh::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMostExperts = 256;

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(~0u, v, distance);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    v = fmaxf(v, __shfl_xor_sync(~0u, v, distance));
  return v;
}
__device__ __forceinline__ float sigmoid(float v) { return 1.f / (1.f + expf(-v)); }

struct Softmax {  // of a row: exp(logit - most) / sum
  float most, sum;
};

/// The logits of a token, or what became of them; `rest` where there is no expert.
template <int kPer>
struct Row {
  float v[kPer];

  __device__ __forceinline__ void load(const float* row, int num_experts, int lane, float rest) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) v[j] = j * 32 + lane < num_experts ? row[j * 32 + lane] : rest;
  }
  __device__ __forceinline__ void store(float* row, int num_experts, int lane) const {
#pragma unroll
    for (int j = 0; j < kPer; ++j)
      if (j * 32 + lane < num_experts) row[j * 32 + lane] = v[j];
  }
  __device__ __forceinline__ float sum() const {
    float s = 0.f;
#pragma unroll
    for (int j = 0; j < kPer; ++j) s += v[j];
    return warp_sum(s);
  }
  __device__ __forceinline__ float dot(const Row& other) const {
    float s = 0.f;
#pragma unroll
    for (int j = 0; j < kPer; ++j) s += v[j] * other.v[j];
    return warp_sum(s);
  }
  /// For logits whose rest is -inf.
  __device__ __forceinline__ Softmax softmax() {
    float most = v[0];
#pragma unroll
    for (int j = 1; j < kPer; ++j) most = fmaxf(most, v[j]);
    most = warp_max(most);
#pragma unroll
    for (int j = 0; j < kPer; ++j) v[j] = expf(v[j] - most);
    const float all = sum();
#pragma unroll
    for (int j = 0; j < kPer; ++j) v[j] /= all;
    return {most, all};
  }
};

struct WeighParams {
  Weighing w;
  const float* logits_TE;
  const int64_t* experts_TK;
  float* weights_TK;          // of forward
  const float* d_weights_TK;  // of backward
  float* d_logits_TE;
};

/// The choice of a lane, and its score before the weights add up to one; NaN for an expert that
/// there is not.
struct Chosen {
  int expert;
  float score;
};

template <int kPer>
__device__ __forceinline__ Chosen chosen_by(const WeighParams& p, int64_t token, int lane,
                                            Row<kPer>& row) {
  const auto num_experts = static_cast<int>(p.w.num_experts);
  const bool is_choice = lane < p.w.top_k;
  const int64_t expert = is_choice ? p.experts_TK[token * p.w.top_k + lane] : -1;
  const bool is_there = expert >= 0 && expert < num_experts;
  const float* logits = p.logits_TE + token * num_experts;
  Chosen c{is_there ? static_cast<int>(expert) : -1, 0.f};
  if (p.w.scoring == Weighing::softmax) {
    row.load(logits, num_experts, lane, -INFINITY);
    const Softmax of_row = row.softmax();
    if (is_there) c.score = expf(logits[c.expert] - of_row.most) / of_row.sum;
  } else if (p.w.scoring == Weighing::softmax_chosen) {
    const float logit = is_there ? logits[c.expert] : -INFINITY;
    const float power = expf(logit - warp_max(logit));
    c.score = power / warp_sum(power);
  } else if (is_there) {
    c.score = sigmoid(logits[c.expert]);
  }
  if (is_choice && !is_there) c.score = __int_as_float(0x7fffffff);
  return c;
}

template <int kPer>
__global__ void __launch_bounds__(kThreads) weigh_kernel(const WeighParams p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (token >= p.w.num_tokens) return;
  Row<kPer> row;
  const Chosen c = chosen_by<kPer>(p, token, lane, row);
  const float sum = warp_sum(c.score) + p.w.epsilon;
  const float weight = (p.w.normalize ? c.score / sum : c.score) * p.w.scale;
  if (lane < p.w.top_k) p.weights_TK[token * p.w.top_k + lane] = weight;
}

template <int kPer>
__global__ void __launch_bounds__(kThreads) weigh_backward_kernel(const WeighParams p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (token >= p.w.num_tokens) return;
  Row<kPer> row, d;
  const Chosen c = chosen_by<kPer>(p, token, lane, row);
  float d_score = lane < p.w.top_k ? p.d_weights_TK[token * p.w.top_k + lane] * p.w.scale : 0.f;
  if (p.w.normalize) {
    const float sum = warp_sum(c.score) + p.w.epsilon;
    d_score = (d_score - warp_sum(d_score * c.score) / sum) / sum;
    if (lane >= p.w.top_k) d_score = 0.f;
  }
  float term = d_score;  // of the logit, or with softmax of the probability
  if (p.w.scoring == Weighing::sigmoid) term = d_score * c.score * (1.f - c.score);
  if (p.w.scoring == Weighing::softmax_chosen)
    term = c.score * (d_score - warp_sum(d_score * c.score));
#pragma unroll
  for (int j = 0; j < kPer; ++j) d.v[j] = 0.f;
  for (int k = 0; k < p.w.top_k; ++k) {
    const int e = __shfl_sync(~0u, c.expert, k);
    const float value = __shfl_sync(~0u, term, k);
#pragma unroll
    for (int j = 0; j < kPer; ++j)
      if (e == j * 32 + lane) d.v[j] += value;
  }
  if (p.w.scoring == Weighing::softmax) {
    const float along = d.dot(row);
#pragma unroll
    for (int j = 0; j < kPer; ++j) d.v[j] = row.v[j] * (d.v[j] - along);
  }
  d.store(p.d_logits_TE + token * p.w.num_experts, static_cast<int>(p.w.num_experts), lane);
}

struct BalanceParams {
  Balance b;
  const float* logits_TE;
  float* terms;  // [blocks of a sequence, B, 2, E]
  const float* d_sums_BE;
  float* d_logits_TE;
};

__device__ __forceinline__ bool counts(const Balance& b, int64_t token) {
  return !b.valid_T || b.valid_T[token];
}

/// The terms of kBalanceTokens of a sequence: of probabilities, and of choices.
template <int kPer>
__global__ void __launch_bounds__(kThreads) balance_kernel(const BalanceParams p) {
  __shared__ float sums[kWarps][kMostExperts];
  __shared__ int chosen[kMostExperts];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto num_experts = static_cast<int>(p.b.num_experts);
  const int64_t length = p.b.num_tokens / p.b.num_sequences, begin = blockIdx.y * length,
                first = blockIdx.x * kBalanceTokens;
  for (int e = threadIdx.x; e < num_experts; e += kThreads) chosen[e] = 0;
  __syncthreads();
  Row<kPer> sum;
#pragma unroll
  for (int j = 0; j < kPer; ++j) sum.v[j] = 0.f;
  for (int64_t at = first + warp; at < first + kBalanceTokens && at < length; at += kWarps) {
    const int64_t token = begin + at;
    if (!counts(p.b, token)) continue;
    Row<kPer> row;
    row.load(p.logits_TE + token * num_experts, num_experts, lane, -INFINITY);
    if (p.b.softmax) {
      row.softmax();
    } else {
#pragma unroll
      for (int j = 0; j < kPer; ++j) row.v[j] = sigmoid(row.v[j]);
      const float all = row.sum() + kLeastScores;
#pragma unroll
      for (int j = 0; j < kPer; ++j) row.v[j] /= all;
    }
#pragma unroll
    for (int j = 0; j < kPer; ++j) sum.v[j] += row.v[j];
    const int64_t expert = lane < p.b.top_k ? p.b.experts_TK[token * p.b.top_k + lane] : -1;
    if (expert >= 0 && expert < num_experts) atomicAdd(chosen + expert, 1);
  }
  sum.store(sums[warp], num_experts, lane);
  __syncthreads();
  float* out =
      p.terms + (static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y) * 2 * num_experts;
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += sums[w][e];
    out[e] = total;
    out[num_experts + e] = static_cast<float>(chosen[e]);
  }
}

/// The sums of the terms, in order: [B, 2, E] -> [2, B, E].
__global__ void __launch_bounds__(kThreads)
    sum_terms(const float* terms, int num_terms, int num_sequences, int num_experts, float* out) {
  const int all = num_sequences * 2 * num_experts, at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= all) return;
  float sum = 0.f;
#pragma unroll 8
  for (int i = 0; i < num_terms; ++i) sum += terms[static_cast<int64_t>(i) * all + at];
  const int sequence = at / (2 * num_experts), kind = at / num_experts % 2, e = at % num_experts;
  out[(kind * num_sequences + sequence) * num_experts + e] = sum;
}

template <int kPer>
__global__ void __launch_bounds__(kThreads) balance_backward_kernel(const BalanceParams p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (token >= p.b.num_tokens) return;
  const auto num_experts = static_cast<int>(p.b.num_experts);
  const int64_t sequence = token / (p.b.num_tokens / p.b.num_sequences);
  Row<kPer> row, d;
  row.load(p.logits_TE + token * num_experts, num_experts, lane, -INFINITY);
  d.load(p.d_sums_BE + sequence * num_experts, num_experts, lane, 0.f);
  const bool is_counted = counts(p.b, token);
  if (p.b.softmax) {
    row.softmax();
    const float along = row.dot(d);
#pragma unroll
    for (int j = 0; j < kPer; ++j) d.v[j] = row.v[j] * (d.v[j] - along);
  } else {
#pragma unroll
    for (int j = 0; j < kPer; ++j) row.v[j] = sigmoid(row.v[j]);
    const float all = row.sum() + kLeastScores, along = row.dot(d) / all;
#pragma unroll
    for (int j = 0; j < kPer; ++j) d.v[j] = (d.v[j] - along) / all * row.v[j] * (1.f - row.v[j]);
  }
#pragma unroll
  for (int j = 0; j < kPer; ++j) d.v[j] = is_counted ? d.v[j] : 0.f;
  d.store(p.d_logits_TE + token * num_experts, num_experts, lane);
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const int64_t* experts_TK, const bool* valid_T, int64_t num_choices, int top_k,
                 int num_experts, unsigned long long* counts_E) {
  extern __shared__ int chosen[];
  for (int e = threadIdx.x; e < num_experts; e += kThreads) chosen[e] = 0;
  __syncthreads();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < num_choices;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t expert = experts_TK[i];
    if (expert >= 0 && expert < num_experts && (!valid_T || valid_T[i / top_k]))
      atomicAdd(chosen + expert, 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += kThreads)
    if (chosen[e] > 0) atomicAdd(counts_E + e, static_cast<unsigned long long>(chosen[e]));
}

__global__ void __launch_bounds__(kThreads)
    gather_kernel(const float* x, const int* index_R, float* out_R, int64_t num_rows) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= num_rows) return;
  const int index = index_R[at];
  out_R[at] = index >= 0 ? x[index] : 0.f;
}

/// f(experts of a lane as a constant).
template <class F>
Error with_experts(std::int64_t num_experts, F f) {
  if (num_experts <= 32) return f(std::integral_constant<int, 1>());
  if (num_experts <= 64) return f(std::integral_constant<int, 2>());
  if (num_experts <= 128) return f(std::integral_constant<int, 4>());
  return f(std::integral_constant<int, 8>());
}

Error complaint(std::int64_t num_experts, std::int64_t top_k) {
  if (num_experts < 1 || num_experts > kMostExperts) return "a router has 1 to 256 experts";
  if (top_k < 1 || top_k > 32) return "a token chooses 1 to 32 experts";
  return nullptr;
}

}  // namespace

Error weigh(const Weighing& w, const float* logits_TE, const std::int64_t* experts_TK,
            float* weights_TK, Stream stream) {
  if (Error error = complaint(w.num_experts, w.top_k)) return error;
  if (w.num_tokens == 0) return nullptr;
  const WeighParams p{w, logits_TE, experts_TK, weights_TK, nullptr, nullptr};
  return with_experts(w.num_experts, [&](auto per) {
    return launch(stream, weigh_kernel<per>, blocks_for(w.num_tokens, kWarps), kThreads, p);
  });
}

Error weigh_backward(const Weighing& w, const float* logits_TE, const std::int64_t* experts_TK,
                     const float* d_weights_TK, float* d_logits_TE, Stream stream) {
  if (Error error = complaint(w.num_experts, w.top_k)) return error;
  if (w.num_tokens == 0) return nullptr;
  const WeighParams p{w, logits_TE, experts_TK, nullptr, d_weights_TK, d_logits_TE};
  return with_experts(w.num_experts, [&](auto per) {
    return launch(stream, weigh_backward_kernel<per>, blocks_for(w.num_tokens, kWarps), kThreads,
                  p);
  });
}

std::int64_t balance_workspace(const Balance& b) {
  const std::int64_t length = b.num_tokens / b.num_sequences;
  return (length + kBalanceTokens - 1) / kBalanceTokens * b.num_sequences * 2 * b.num_experts;
}

Error balance(const Balance& b, const float* logits_TE, float* workspace, float* sums_2BE,
              Stream stream) {
  if (Error error = complaint(b.num_experts, b.top_k)) return error;
  if (b.num_sequences < 1 || b.num_tokens % b.num_sequences != 0)
    return "sequences have equally many tokens";
  const BalanceParams p{b, logits_TE, workspace, nullptr, nullptr};
  const dim3 grid(blocks_for(b.num_tokens / b.num_sequences, kBalanceTokens),
                  static_cast<unsigned>(b.num_sequences));
  Error error = nullptr;
  if (grid.x > 0)
    error = with_experts(b.num_experts, [&](auto per) {
      return launch(stream, balance_kernel<per>, grid, kThreads, p);
    });
  if (error) return error;
  return launch(stream, sum_terms, blocks_for(b.num_sequences * 2 * b.num_experts, kThreads),
                kThreads, workspace, grid.x, b.num_sequences, b.num_experts, sums_2BE);
}

Error balance_backward(const Balance& b, const float* logits_TE, const float* d_sums_BE,
                       float* d_logits_TE, Stream stream) {
  if (Error error = complaint(b.num_experts, b.top_k)) return error;
  if (b.num_tokens == 0) return nullptr;
  const BalanceParams p{b, logits_TE, nullptr, d_sums_BE, d_logits_TE};
  return with_experts(b.num_experts, [&](auto per) {
    return launch(stream, balance_backward_kernel<per>, blocks_for(b.num_tokens, kWarps), kThreads,
                  p);
  });
}

Error count_choices(const std::int64_t* experts_TK, const bool* valid_T, std::int64_t num_tokens,
                    std::int64_t top_k, std::int64_t num_experts, std::int64_t* counts_E,
                    Stream stream) {
  if (num_experts < 1 || num_experts > 8192) return "a router has 1 to 8192 experts";
  if (num_tokens * top_k == 0) return nullptr;
  const std::int64_t num_choices = num_tokens * top_k;
  const unsigned wanted = blocks_for(num_choices, 4 * kThreads),
                 blocks = wanted < 132 ? wanted : 132;
  count_kernel<<<blocks, kThreads, num_experts * sizeof(int), static_cast<cudaStream_t>(stream)>>>(
      experts_TK, valid_T, num_choices, static_cast<int>(top_k), static_cast<int>(num_experts),
      reinterpret_cast<unsigned long long*>(counts_E));
  return text_of(cudaGetLastError());
}

Error gather_floats(const float* x, const std::int32_t* index_R, float* out_R,
                    std::int64_t num_rows, Stream stream) {
  if (num_rows == 0) return nullptr;
  return launch(stream, gather_kernel, blocks_for(num_rows, kThreads), kThreads, x, index_R, out_R,
                num_rows);
}

}  // namespace moesh::kernels::cuda
