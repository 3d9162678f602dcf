// Sinks after attention without them, forward and backward: one pass over its result, eight
// features a thread. A row is one head of one token; a group of lanes has it, as many as it has
// eights of features, or up to the next power of two.

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/host.h"

namespace moesh::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostNumbers = int64_t{1} << 34;  // eights are counted in 32 bits
constexpr int kTerms = 32;  // blocks that divide the tokens of a head in backward

struct SinkParams {
  bf16* y;
  const bf16* dy;
  const float* lse;  // [batch, heads, length]; of backward: with the sinks
  const float* sinks;
  float* lse_out;  // of forward
  float* terms;    // of backward: [kTerms, heads]
  uint32_t num_tokens, length;
  int num_heads, width, lanes;
};

__device__ __forceinline__ uint32_t lse_at(const SinkParams& p, uint32_t token, int head) {
  const uint32_t sequence = token / p.length;
  return (sequence * p.num_heads + head) * p.length + (token - sequence * p.length);
}

__global__ void __launch_bounds__(kThreads) add_sinks_kernel(const SinkParams p) {
  const uint32_t chunk = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t per_row = p.width / 8;
  const uint32_t row = chunk / per_row, token = row / p.num_heads;
  if (token >= p.num_tokens) return;
  const int head = static_cast<int>(row - token * p.num_heads);
  const uint32_t at = lse_at(p, token, head);
  const float before = p.lse[at], sink = p.sinks[head];
  const float after = fmaxf(before, sink) + log1pf(expf(-fabsf(before - sink)));
  const float share = expf(before - after);
  if (chunk == row * per_row) p.lse_out[at] = after;
  float v[8];
  unpack(load16(p.y + 8l * chunk), v);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] *= share;
  store16(p.y + 8l * chunk, packed(v));
}

/// A block has every kTerms-th of the rows of one head, and leaves their sum.
__global__ void __launch_bounds__(kThreads) sink_terms_kernel(const SinkParams p) {
  __shared__ float sums[kThreads];
  const int head = blockIdx.y, num_groups = kThreads / p.lanes;
  const int group = threadIdx.x / p.lanes, lane = threadIdx.x % p.lanes;
  const float sink = p.sinks[head];
  float sum = 0.f;
  for (uint32_t token = blockIdx.x * num_groups + group; token < p.num_tokens;
       token += kTerms * num_groups) {
    const int64_t row = (static_cast<int64_t>(token) * p.num_heads + head) * p.width;
    float dot = 0.f;
    if (lane * 8 < p.width) {
      float a[8], b[8];
      unpack(load16(p.y + row + lane * 8), a), unpack(load16(p.dy + row + lane * 8), b);
#pragma unroll
      for (int i = 0; i < 8; ++i) dot += a[i] * b[i];
    }
    sum += expf(sink - p.lse[lse_at(p, token, head)]) * dot;  // of this lane's features
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) p.terms[blockIdx.x * p.num_heads + head] = sums[0];
}

__global__ void __launch_bounds__(kThreads)
    sum_sink_terms(const float* terms, int num_heads, float* d_sinks) {
  const int head = blockIdx.x * kThreads + threadIdx.x;
  if (head >= num_heads) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kTerms; ++i) sum += terms[i * num_heads + head];
  d_sinks[head] = -sum;
}

Error complaint(const Sinks& s) {
  if (s.width < 8 || s.width % 8 != 0 || s.width > 256)
    return "sinks take heads of a multiple of 8 features, at most 256";
  if (s.batch * s.length * s.num_heads * s.width >= kMostNumbers)
    return "sinks take fewer than 2^34 numbers";
  return nullptr;
}

SinkParams params_of(const Sinks& s, const float* lse, const float* sinks) {
  int lanes = 1;
  while (lanes * 8 < s.width) lanes *= 2;
  return {.y = nullptr,
          .dy = nullptr,
          .lse = lse,
          .sinks = sinks,
          .lse_out = nullptr,
          .terms = nullptr,
          .num_tokens = static_cast<uint32_t>(s.batch * s.length),
          .length = static_cast<uint32_t>(s.length),
          .num_heads = static_cast<int>(s.num_heads),
          .width = static_cast<int>(s.width),
          .lanes = lanes};
}

}  // namespace

Error add_sinks(const Sinks& s, const float* sinks, const float* lse, void* y, float* lse_out,
                Stream stream) {
  if (Error error = complaint(s)) return error;
  SinkParams p = params_of(s, lse, sinks);
  p.y = static_cast<bf16*>(y), p.lse_out = lse_out;
  const uint32_t num_chunks = p.num_tokens * p.num_heads * (p.width / 8);
  if (num_chunks == 0) return nullptr;
  return launch(stream, add_sinks_kernel, blocks_for(num_chunks, kThreads), kThreads, p);
}

std::int64_t sink_workspace(const Sinks& s) { return kTerms * s.num_heads; }

Error sink_gradient(const Sinks& s, const float* sinks, const float* lse, const void* y,
                    const void* dy, float* workspace, float* d_sinks, Stream stream) {
  if (Error error = complaint(s)) return error;
  if (s.num_heads == 0) return nullptr;
  SinkParams p = params_of(s, lse, sinks);
  p.y = const_cast<bf16*>(static_cast<const bf16*>(y)), p.dy = static_cast<const bf16*>(dy);
  p.terms = workspace;
  const dim3 grid(kTerms, static_cast<unsigned>(p.num_heads));
  const Error error = launch(stream, sink_terms_kernel, grid, kThreads, p);
  return error ? error
               : launch(stream, sum_sink_terms, blocks_for(p.num_heads, kThreads), kThreads,
                        workspace, p.num_heads, d_sinks);
}

}  // namespace moesh::kernels::cuda
