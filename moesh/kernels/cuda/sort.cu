// A stable counting sort of the routed rows by expert, in two launches, with nothing but integers:
// each block counts its part of the choices; then each block adds up the counts of those before it
// and puts its choices where they belong.
// T tokens, K top-k, E experts that take part, N = T * K choices

#include "moesh/kernels/cuda/host.h"
#include "moesh/kernels/cuda/tiles.h"

namespace moesh::kernels::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32, kPerWarp = 256, kPerBlock = kWarps * kPerWarp;

struct SortParams {
  Sort sort;
  int num_choices, num_blocks;
};

int blocks_of(const Sort& s) {
  return static_cast<int>((s.num_tokens * s.top_k + kPerBlock - 1) / kPerBlock);
}

/// Choice `index` as a number among the experts that take part; -1: not one of them.
__device__ int expert_of(const SortParams& p, int index) {
  if (index >= p.num_choices) return -1;
  const int64_t expert = p.sort.experts_TK[index] - p.sort.first_expert;
  return expert >= 0 && expert < p.sort.num_experts ? static_cast<int>(expert) : -1;
}

/// Adds a warp's choices to its counts; returns how many of the same expert came before this
/// lane's.
__device__ int count_warp(int* counts, int expert, int lane) {
  const unsigned same = __match_any_sync(~0u, expert);
  const int earlier = __popc(same & ((1u << lane) - 1));
  const int base = expert >= 0 ? counts[expert] : 0;
  __syncwarp();
  if (expert >= 0 && earlier == 0) counts[expert] = base + __popc(same);
  __syncwarp();
  return base + earlier;
}

__device__ void count_block(const SortParams& p, int (*counts)[kMaxExperts]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kWarps * kMaxExperts; i += kThreads) counts[0][i] = 0;
  __syncthreads();
  const int first = blockIdx.x * kPerBlock + warp * kPerWarp;
  for (int i = lane; i < kPerWarp; i += 32) count_warp(counts[warp], expert_of(p, first + i), lane);
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) count(const SortParams p) {
  __shared__ int counts[kWarps][kMaxExperts];
  for (int i = threadIdx.x; i < kPerBlock; i += kThreads) {
    const int index = blockIdx.x * kPerBlock + i;
    if (index >= p.num_choices) break;
    const int64_t expert = p.sort.experts_TK[index];
    if (expert < 0 || expert >= p.sort.all_experts) __trap();
  }
  count_block(p, counts);
  for (int e = threadIdx.x; e < p.sort.num_experts; e += kThreads) {
    int sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += counts[warp][e];
    p.sort.workspace[blockIdx.x * p.sort.num_experts + e] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) put(const SortParams p) {
  __shared__ int counts[kWarps][kMaxExperts];
  __shared__ int totals[kMaxExperts];
  const int num_experts = static_cast<int>(p.sort.num_experts);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  count_block(p, counts);
  int before[kMaxExperts / kThreads] = {};  // choices of an expert in the blocks before this one
#pragma unroll
  for (int i = 0; i < kMaxExperts / kThreads; ++i) {
    const int e = threadIdx.x + i * kThreads;
    if (e >= num_experts) break;
    int total = 0;
#pragma unroll 8
    for (int block = 0; block < p.num_blocks; ++block) {
      const int n = p.sort.workspace[block * num_experts + e];
      total += n;
      before[i] += block < blockIdx.x ? n : 0;
    }
    totals[e] = total;
  }
  __syncthreads();
  if (warp == 0) {  // totals -> ends
    int carry = 0;
    for (int first = 0; first < num_experts; first += 32) {
      const int e = first + lane;
      int sum = e < num_experts ? totals[e] : 0;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
      }
      sum += carry;
      carry = __shfl_sync(~0u, sum, 31);
      if (e >= num_experts) continue;
      totals[e] = sum;
      if (blockIdx.x == 0) p.sort.ends_E[e] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kMaxExperts / kThreads; ++i) {
    const int e = threadIdx.x + i * kThreads;
    if (e >= num_experts) break;
    int at = before[i] + (e > 0 ? totals[e - 1] : 0);
    for (int w = 0; w < kWarps; ++w) {
      const int n = counts[w][e];
      counts[w][e] = at;
      at += n;
    }
  }
  __syncthreads();
  const int first = blockIdx.x * kPerBlock + warp * kPerWarp;
  for (int i = lane; i < kPerWarp; i += 32) {
    const int index = first + i, expert = expert_of(p, index);
    const int row = count_warp(counts[warp], expert, lane);
    if (index >= p.num_choices) continue;
    p.sort.inverse_TK[index] = expert >= 0 ? row : -1;
    if (expert < 0) continue;
    p.sort.token_R[row] = index / static_cast<int>(p.sort.top_k);
    if (p.sort.order_R) p.sort.order_R[row] = index;
    if (p.sort.weight_TK) p.sort.score_R[row] = p.sort.weight_TK[index];
  }
}

}  // namespace

std::int64_t sort_workspace(const Sort& s) { return blocks_of(s) * s.num_experts; }

Error sort(const Sort& s, Stream stream) {
  if (s.num_experts < 1 || s.num_experts > kMaxExperts) return "experts are to be 1 to 512";
  if (s.num_tokens * s.top_k > 0x7fffffff) return "choices are to be fewer than 2^31";
  const SortParams p{s, static_cast<int>(s.num_tokens * s.top_k), blocks_of(s)};
  if (p.num_choices == 0)
    return text_of(cudaMemsetAsync(s.ends_E, 0, s.num_experts * sizeof(int),
                                   static_cast<cudaStream_t>(stream)));
  const Error error = launch(stream, count, p.num_blocks, kThreads, p);
  return error ? error : launch(stream, put, p.num_blocks, kThreads, p);
}

}  // namespace moesh::kernels::cuda
