// Softmax cross-entropy of a slice of the vocabulary: a block has a token, and reads its logits
// once for the sums and once for the gradient, which it writes over them. N tokens, V words

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/host.h"

namespace moesh::kernels::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

/// A maximum, and the sum of exponentials beside it.
struct Sums {
  float max, sum;
};
__device__ __forceinline__ Sums joined(Sums a, Sums b) {
  const float max = fmaxf(a.max, b.max);
  // -inf is the maximum of no number: its sum is 0, and -inf less -inf would be NaN.
  const float left = a.max == max ? a.sum : a.sum * __expf(a.max - max);
  const float right = b.max == max ? b.sum : b.sum * __expf(b.max - max);
  return {max, left + right};
}

__global__ void __launch_bounds__(kThreads)
    logit_sums_kernel(const bf16* logits, const int64_t* label_N, int num_chunks, float* max_N,
                      float* sum_N, float* picked_N) {
  __shared__ Sums shared[kWarps];
  const int64_t token = blockIdx.x;
  const bf16* row = logits + token * num_chunks * 8;
  Sums sums{-INFINITY, 0.f};
#pragma unroll 4
  for (int chunk = threadIdx.x; chunk < num_chunks; chunk += kThreads) {
    float v[8];
    unpack(load16(row + chunk * 8), v);
    float max = v[0], sum = 0.f;
    bool is_nan = v[0] != v[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) max = fmaxf(max, v[i]), is_nan |= v[i] != v[i];
    if (max > -INFINITY)
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += __expf(v[i] - max);
    if (is_nan) sum = NAN;  // fmaxf drops it
    sums = joined(sums, {max, sum});
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    sums = joined(
        sums, {__shfl_xor_sync(~0u, sums.max, distance), __shfl_xor_sync(~0u, sums.sum, distance)});
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = sums;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kWarps; ++i) sums = joined(sums, shared[i]);
  const int64_t label = label_N[token];
  max_N[token] = sums.max, sum_N[token] = sums.sum;
  picked_N[token] = label >= 0 ? __bfloat162float(row[label]) : 0.f;
}

__global__ void __launch_bounds__(kThreads)
    logit_gradient_kernel(bf16* logits, const int64_t* label_N, int num_chunks,
                          const float* total_N, const float* weight_N) {
  const int64_t token = blockIdx.x;
  bf16* row = logits + token * num_chunks * 8;
  const int label = static_cast<int>(label_N[token]);
  const float total = total_N[token], weight = weight_N[token];
#pragma unroll 4
  for (int chunk = threadIdx.x; chunk < num_chunks; chunk += kThreads) {
    float v[8];
    unpack(load16(row + chunk * 8), v);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      v[i] = weight * (__expf(v[i] - total) - (chunk * 8 + i == label ? 1.f : 0.f));
    store16(row + chunk * 8, packed(v));
  }
}

Error complaint(const Logits& l) {
  return l.num_words < 8 || l.num_words % 8 != 0 || l.num_words > INT32_MAX
             ? "logits have a multiple of 8 words"
             : nullptr;
}

}  // namespace

Error logit_sums(const Logits& l, const void* logits_NV, float* max_N, float* sum_N,
                 float* picked_N, Stream stream) {
  if (Error error = complaint(l)) return error;
  if (l.num_tokens == 0) return nullptr;
  return launch(stream, logit_sums_kernel, l.num_tokens, kThreads, logits_NV, l.label_N,
                l.num_words / 8, max_N, sum_N, picked_N);
}

Error logit_gradient(const Logits& l, void* logits_NV, const float* total_N, const float* weight_N,
                     Stream stream) {
  if (Error error = complaint(l)) return error;
  if (l.num_tokens == 0) return nullptr;
  return launch(stream, logit_gradient_kernel, l.num_tokens, kThreads, logits_NV, l.label_N,
                l.num_words / 8, total_N, weight_N);
}

}  // namespace moesh::kernels::cuda
