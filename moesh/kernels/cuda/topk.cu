// The best experts of a token, by a warp per token. T tokens, E experts, K top-k

#include "moesh/kernels/cuda/host.h"

namespace moesh::kernels::cuda {
namespace {

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
/// A warp has one token; lane i has experts i, i + 32, ...
template <int kPer>
struct TopKeys {
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

/// A warp per token; largest first.
template <int kPer>
__global__ void __launch_bounds__(256)
    top_k_kernel(const float* scores_TE, int num_tokens, int num_experts, int k, float* values_TK,
                 int64_t* experts_TK) {
  const int token = (blockIdx.x * 256 + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (token >= num_tokens) return;
  TopKeys<kPer> choice;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int e = j * 32 + lane;
    choice.keys[j] = 0;
    if (e >= num_experts) continue;
    choice.keys[j] = key_of(scores_TE[static_cast<int64_t>(token) * num_experts + e]);
  }
  for (int i = 0; i < k; ++i) {
    unsigned key;
    const int expert = choice.take(lane, key);
    if (lane > 0) continue;
    experts_TK[static_cast<int64_t>(token) * k + i] = expert;
    values_TK[static_cast<int64_t>(token) * k + i] = value_of(key);
  }
}

}  // namespace

Error top_k(const float* scores_TE, std::int64_t num_tokens, std::int64_t num_experts,
            std::int64_t k, float* values_TK, std::int64_t* experts_TK, Stream stream) {
  if (num_experts < 1 || num_experts > 256) return "routed experts are to be 1 to 256";
  if (k < 1 || k > num_experts) return "k is to be 1 to the number of experts";
  if (num_tokens == 0) return nullptr;
  const auto kernel = num_experts <= 64    ? top_k_kernel<2>
                      : num_experts <= 128 ? top_k_kernel<4>
                                           : top_k_kernel<8>;
  return launch(stream, kernel, blocks_for(num_tokens, 8), 256, scores_TE, num_tokens, num_experts,
                k, values_TK, experts_TK);
}

}  // namespace moesh::kernels::cuda
