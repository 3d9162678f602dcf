// The short convolution before the delta rule, with four taps and silu. A thread has eight channels
// of a run of tokens, and keeps the last inputs in registers.

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/host.h"

namespace moesh::kernels::cuda {
namespace {

constexpr int kThreads = 128, kTaps = 4;
constexpr int kForwardRun = 32, kBackwardRun = 128;  // tokens

struct ConvolutionParams {
  Convolution c;
  const bf16* x;
  bf16* y;  // of backward: dx
  const bf16* dy;
  float* dw_terms;
};

/// The channels of a thread, and its taps.
struct Channels {
  int64_t at_x, at_y;  // of token 0
  int64_t stride_y;
  float w[kTaps][8];  // by the distance to the token
  bool exist;

  __device__ explicit Channels(const ConvolutionParams& p) {
    const int64_t pieces = p.c.width / 8,
                  i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, head = i / pieces,
                  channel = i % pieces * 8, b = blockIdx.z;
    exist = head < p.c.num_heads;
    stride_y = p.c.num_heads * p.c.width;
    at_x = b * p.c.strides[0] + head * p.c.strides[2] + channel;
    at_y = b * p.c.length * stride_y + head * p.c.width + channel;
    if (!exist) return;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 taps =
          __ldg(reinterpret_cast<const float4*>(p.c.w) + head * p.c.width + channel + j);
      w[0][j] = taps.w, w[1][j] = taps.z, w[2][j] = taps.y, w[3][j] = taps.x;
    }
  }
  __device__ void load(const ConvolutionParams& p, int64_t token, float (&v)[8]) const {
    unpack(token >= 0 ? __ldg(reinterpret_cast<const uint4*>(p.x + at_x + token * p.c.strides[1]))
                      : uint4{},
           v);
  }
};

/// How many tokens before `token` are of its document, as far as the taps reach.
__device__ __forceinline__ int reach(const ConvolutionParams& p, int64_t token) {
  const int64_t start =
      p.c.starts ? p.c.starts[static_cast<int64_t>(blockIdx.z) * p.c.length + token] : 0;
  return static_cast<int>(min(token - start, static_cast<int64_t>(kTaps - 1)));
}

/// Before silu, from the inputs of the last tokens: the token's own is x[0].
__device__ __forceinline__ void convolve(const Channels& c, const float (&x)[kTaps][8], int reach,
                                         float (&z)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    z[j] = c.w[0][j] * x[0][j];
#pragma unroll
    for (int s = 1; s < kTaps; ++s)
      if (s <= reach) z[j] += c.w[s][j] * x[s][j];
  }
}

/// Everything one token on; x[0] is free.
__device__ __forceinline__ void move_on(float (&x)[kTaps][8]) {
#pragma unroll
  for (int s = kTaps - 1; s > 0; --s)
#pragma unroll
    for (int j = 0; j < 8; ++j) x[s][j] = x[s - 1][j];
}

__global__ void __launch_bounds__(kThreads) convolution_kernel(const ConvolutionParams p) {
  const Channels c(p);
  if (!c.exist) return;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kForwardRun,
                end = min(first + kForwardRun, p.c.length);
  float x[kTaps][8];
#pragma unroll
  for (int s = 1; s < kTaps; ++s) c.load(p, first - s, x[s - 1]);
#pragma unroll 4
  for (int64_t token = first; token < end; ++token) {
    move_on(x);
    c.load(p, token, x[0]);
    float z[8];
    convolve(c, x, reach(p, token), z);
#pragma unroll
    for (int j = 0; j < 8; ++j) z[j] *= ptx::sigmoid(z[j]);
    store16(p.y + c.at_y + token * c.stride_y, packed(z));
  }
}

/// dz = dy silu'(z); dx_t is the sum of w_s dz_{t + s}, and dw_s that of dz_t x_{t - s}, in a
/// document. The run goes on for three tokens whose own sums belong to the next one.
__global__ void __launch_bounds__(kThreads) convolution_backward_kernel(const ConvolutionParams p) {
  const Channels c(p);
  if (!c.exist) return;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kBackwardRun,
                end = min(first + kBackwardRun, p.c.length);
  float x[kTaps][8], dx[kTaps][8] = {}, dw[kTaps][8] = {};
#pragma unroll
  for (int s = 1; s < kTaps; ++s) c.load(p, first - s, x[s - 1]);
#pragma unroll 4
  for (int64_t token = first; token < end + kTaps - 1; ++token) {
    move_on(x), move_on(dx);
#pragma unroll
    for (int j = 0; j < 8; ++j) dx[0][j] = 0.f;
    if (token < p.c.length) {
      c.load(p, token, x[0]);
      const int before = reach(p, token);
      float z[8], dz[8];
      convolve(c, x, before, z);
      unpack(__ldg(reinterpret_cast<const uint4*>(p.dy + c.at_y + token * c.stride_y)), dz);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float sigma = ptx::sigmoid(z[j]);
        dz[j] *= sigma * (1.f + z[j] * (1.f - sigma));
#pragma unroll
        for (int s = 0; s < kTaps; ++s)
          if (s <= before) {
            dx[s][j] += c.w[s][j] * dz[j];
            if (token < end) dw[s][j] += dz[j] * x[s][j];
          }
      }
    }
    if (token >= first + kTaps - 1)
      store16(p.y + c.at_y + (token - (kTaps - 1)) * c.stride_y, packed(dx[kTaps - 1]));
  }
  const int64_t term = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const int64_t channel = c.at_y % c.stride_y;
#pragma unroll
  for (int j = 0; j < 8; ++j)
    reinterpret_cast<float4*>(p.dw_terms)[term * c.stride_y + channel + j] = {dw[3][j], dw[2][j],
                                                                              dw[1][j], dw[0][j]};
}

dim3 grid_of(const Convolution& c, int run) {
  const std::int64_t pieces = c.num_heads * c.width / 8;
  return {blocks_for(pieces, kThreads), blocks_for(c.length, run), static_cast<unsigned>(c.batch)};
}

ConvolutionParams params_of(const Convolution& c, const void* x, void* y) {
  return {.c = c,
          .x = static_cast<const bf16*>(x),
          .y = static_cast<bf16*>(y),
          .dy = nullptr,
          .dw_terms = nullptr};
}

}  // namespace

Error convolution(const Convolution& c, const void* x, void* y, Stream stream) {
  return launch(stream, convolution_kernel, grid_of(c, kForwardRun), kThreads, params_of(c, x, y));
}

Error convolution_backward(const Convolution& c, const void* x, const void* dy, float* dw_terms,
                           void* dx, Stream stream) {
  ConvolutionParams p = params_of(c, x, dx);
  p.dy = static_cast<const bf16*>(dy), p.dw_terms = dw_terms;
  return launch(stream, convolution_backward_kernel, grid_of(c, kBackwardRun), kThreads, p);
}

}  // namespace moesh::kernels::cuda
