// RMSNorm, forward and backward. One to eight warps have a row, which stays in registers between
// the sum over it and its use. N rows, D features

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/host.h"

namespace moesh::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kChunks = 4;                         // of 8 features that a thread has at most
constexpr int kWidth = kChunks * 32 * 8;           // features of a warp
constexpr int kMaxBlocks = 264;                    // of backward: each leaves a term of d_weight
constexpr int kTermGroups = 8, kTermColumns = 32;  // of the sum over these terms

struct NormParams {
  const bf16* x;
  int64_t stride;
  const float* weight;
  int64_t num_rows;
  int width;
  float eps;
  bf16* y;  // of backward: dx
  float* r_N;
  const bf16* dy;
  float* terms;  // [blocks, D]
};

/// The sum over the threads of a row, which all of them get.
template <int kWarpsPerRow>
__device__ __forceinline__ float row_sum(float v, float* shared) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) v += __shfl_xor_sync(~0u, v, distance);
  if constexpr (kWarpsPerRow == 1) return v;
  const int warp = threadIdx.x / 32, first = warp / kWarpsPerRow * kWarpsPerRow;
  __syncthreads();  // the sums before these have been read
  if (threadIdx.x % 32 == 0) shared[warp] = v;
  __syncthreads();
  v = 0.f;
#pragma unroll
  for (int i = 0; i < kWarpsPerRow; ++i) v += shared[first + i];
  return v;
}

__device__ __forceinline__ void load_weight(const float* weight, int column, float (&w)[8]) {
  if (!weight) {
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = 1.f;
    return;
  }
  const float4 a = __ldg(reinterpret_cast<const float4*>(weight + column)),
               b = __ldg(reinterpret_cast<const float4*>(weight + column) + 1);
  w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
}

template <int kWarpsPerRow>
__global__ void __launch_bounds__(kThreads) norm_kernel(const NormParams p) {
  __shared__ float shared[kWarps];
  constexpr int kGroup = 32 * kWarpsPerRow;  // threads of a row
  const int lane = threadIdx.x % kGroup;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup;
  const bool is_row = row < p.num_rows;
  uint4 held[kChunks];
  float sum = 0.f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int column = (c * kGroup + lane) * 8;
    held[c] = is_row && column < p.width ? load16(p.x + row * p.stride + column) : uint4{};
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    float v[8];
    unpack(held[c], v);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += v[i] * v[i];
  }
  const float r = rsqrtf(row_sum<kWarpsPerRow>(sum, shared) / p.width + p.eps);
  if (!is_row) return;
  if (lane == 0) p.r_N[row] = r;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int column = (c * kGroup + lane) * 8;
    if (column >= p.width) continue;
    float v[8], w[8];
    unpack(held[c], v), load_weight(p.weight, column, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= r * w[i];
    store16(p.y + row * p.width + column, packed(v));
  }
}

/// dx = r (dy w - n mean(dy w n)), d_weight = the sum of dy n over the rows, n = r x.
template <int kWarpsPerRow>
__global__ void __launch_bounds__(kThreads) norm_backward_kernel(const NormParams p) {
  __shared__ float shared[kWarps];
  __shared__ float sums[kWarps / kWarpsPerRow][kWidth * kWarpsPerRow];
  constexpr int kGroup = 32 * kWarpsPerRow, kGroups = kThreads / kGroup;
  const int lane = threadIdx.x % kGroup, group = threadIdx.x / kGroup;
  float d_weight[kChunks][8] = {};
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kGroups; first < p.num_rows;
       first += static_cast<int64_t>(gridDim.x) * kGroups) {
    const int64_t row = first + group;
    const bool is_row = row < p.num_rows;
    const float r = is_row ? p.r_N[row] : 0.f;
    uint4 x[kChunks], dy[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = (c * kGroup + lane) * 8;
      const bool is_there = is_row && column < p.width;
      x[c] = is_there ? load16(p.x + row * p.stride + column) : uint4{};
      dy[c] = is_there ? load16(p.dy + row * p.width + column) : uint4{};
    }
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = (c * kGroup + lane) * 8;
      if (column >= p.width) continue;
      float v[8], g[8], w[8];
      unpack(x[c], v), unpack(dy[c], g), load_weight(p.weight, column, w);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float term = g[i] * v[i] * r;
        d_weight[c][i] += term;
        sum += term * w[i];
      }
    }
    const float along = row_sum<kWarpsPerRow>(sum, shared) / p.width;
    if (!is_row) continue;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = (c * kGroup + lane) * 8;
      if (column >= p.width) continue;
      float v[8], g[8], w[8];
      unpack(x[c], v), unpack(dy[c], g), load_weight(p.weight, column, w);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = r * (g[i] * w[i] - v[i] * r * along);
      store16(p.y + row * p.width + column, packed(v));
    }
  }
  if (!p.terms) return;
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[group][(c * kGroup + lane) * 8 + i] = d_weight[c][i];
  __syncthreads();
  for (int column = threadIdx.x; column < p.width; column += kThreads) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) total += sums[i][column];
    p.terms[static_cast<int64_t>(blockIdx.x) * p.width + column] = total;
  }
}

/// The sum of the blocks' terms: 32 columns a block, in eight groups of terms.
__global__ void __launch_bounds__(kThreads)
    sum_terms(const float* terms, int num_terms, int width, float* out) {
  __shared__ float sums[kTermGroups][kTermColumns];
  const int group = threadIdx.x / kTermColumns, lane = threadIdx.x % kTermColumns;
  const int column = blockIdx.x * kTermColumns + lane;
  float sum = 0.f;
  if (column < width) {
#pragma unroll 8
    for (int i = group; i < num_terms; i += kTermGroups)
      sum += terms[static_cast<int64_t>(i) * width + column];
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group != 0 || column >= width) return;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kTermGroups; ++i) total += sums[i][lane];
  out[column] = total;
}

int warps_per_row(std::int64_t width) {
  int warps = 1;
  while (warps < kWarps && warps * kWidth < width) warps *= 2;
  return warps;
}

/// f(warps per row as a constant).
template <class F>
void with_warps(std::int64_t width, F f) {
  switch (warps_per_row(width)) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 4: return f(std::integral_constant<int, 4>());
    default: return f(std::integral_constant<int, 8>());
  }
}

Error complaint(const Norm& n) {
  if (n.width < 8 || n.width % 8 != 0 || n.width > kWidth * kWarps || n.stride % 8 != 0)
    return "a norm takes a multiple of 8 features, at most 8192, in rows that are multiples of 8 "
           "apart";
  return nullptr;
}

std::int64_t blocks_for(const Norm& n) {
  const std::int64_t rows = kWarps / warps_per_row(n.width);  // of a block
  return (n.num_rows + rows - 1) / rows;
}
std::int64_t backward_blocks(const Norm& n) {
  return blocks_for(n) < kMaxBlocks ? blocks_for(n) : kMaxBlocks;
}

}  // namespace

Error norm(const Norm& n, const void* x, void* y, float* r_N, Stream stream) {
  if (Error error = complaint(n)) return error;
  if (n.num_rows == 0) return nullptr;
  const NormParams p{.x = static_cast<const bf16*>(x),
                     .stride = n.stride,
                     .weight = n.weight,
                     .num_rows = n.num_rows,
                     .width = static_cast<int>(n.width),
                     .eps = n.eps,
                     .y = static_cast<bf16*>(y),
                     .r_N = r_N,
                     .dy = nullptr,
                     .terms = nullptr};
  with_warps(n.width, [&](auto warps) {
    norm_kernel<warps>
        <<<static_cast<unsigned>(blocks_for(n)), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            p);
  });
  return text_of(cudaGetLastError());
}

std::int64_t norm_workspace(const Norm& n) { return n.weight ? backward_blocks(n) * n.width : 0; }

Error norm_backward(const Norm& n, const void* x, const float* r_N, const void* dy,
                    float* workspace, void* dx, float* d_weight, Stream stream) {
  if (Error error = complaint(n)) return error;
  const auto queue = static_cast<cudaStream_t>(stream);
  const NormParams p{.x = static_cast<const bf16*>(x),
                     .stride = n.stride,
                     .weight = n.weight,
                     .num_rows = n.num_rows,
                     .width = static_cast<int>(n.width),
                     .eps = n.eps,
                     .y = static_cast<bf16*>(dx),
                     .r_N = const_cast<float*>(r_N),
                     .dy = static_cast<const bf16*>(dy),
                     .terms = d_weight ? workspace : nullptr};
  const auto num_blocks = static_cast<unsigned>(backward_blocks(n));
  if (num_blocks > 0)
    with_warps(n.width, [&](auto warps) {
      norm_backward_kernel<warps><<<num_blocks, kThreads, 0, queue>>>(p);
    });
  if (d_weight)  // zeros without rows
    sum_terms<<<static_cast<unsigned>((n.width + kTermColumns - 1) / kTermColumns), kThreads, 0,
                queue>>>(workspace, static_cast<int>(num_blocks), p.width, d_weight);
  return text_of(cudaGetLastError());
}

}  // namespace moesh::kernels::cuda
