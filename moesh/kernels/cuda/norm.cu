// RMSNorm, forward and backward. One to eight warps have a row, which stays in registers between
// the sum over it and its use; of a head, which turns as well, a part of a warp. N rows, D features

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
  const bf16 *dy, *beside;
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

/// dx = r (dy w - n mean(dy w n)) + beside, d_weight = the sum of dy n over the rows, n = r x.
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
    uint4 x[kChunks], dy[kChunks], beside[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = (c * kGroup + lane) * 8;
      const bool is_there = is_row && column < p.width;
      x[c] = is_there ? load16(p.x + row * p.stride + column) : uint4{};
      dy[c] = is_there ? load16(p.dy + row * p.width + column) : uint4{};
      beside[c] = is_there && p.beside ? load16(p.beside + row * p.width + column) : uint4{};
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
      float v[8], g[8], w[8], more[8];
      unpack(x[c], v), unpack(dy[c], g), load_weight(p.weight, column, w);
      unpack(beside[c], more);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = r * (g[i] * w[i] - v[i] * r * along) + more[i];
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

constexpr int kHeadThreads = 512, kBackThreads = 256;  // of a block; of one of backward
constexpr int kHeadsAhead = 4, kHeadsBack = 2;         // of a token, read before the first is used
constexpr int kMaxHeadBlocks = 396;                    // of backward

struct HeadsParams {
  const bf16* x;
  int64_t strides[3];
  const float *weight, *cos, *sin;
  const int64_t* positions;       // null: token l of a sequence has line l of the table
  unsigned num_tokens, num_runs;  // in all; of a token: runs of heads that a group takes at once
  unsigned length, num_heads;
  int first_turn, num_turns;  // features
  float eps;
  bf16* y;  // of backward: dx
  float* r_N;
  const bf16* dy;
  float* terms;  // [blocks, D]
};

/// Heads of one token, `count` of them from `first` on; none past the last token.
struct HeadRun {
  const bf16* x;
  int64_t line;  // of the table
  unsigned token, first, count;
};

template <unsigned kCount>
__device__ __forceinline__ HeadRun run_of(const HeadsParams& p, unsigned at) {
  const unsigned token = at / p.num_runs, first = (at - token * p.num_runs) * kCount;
  if (token >= p.num_tokens) return {p.x, 0, 0, 0, 0};
  const unsigned sequence = token / p.length, position = token - sequence * p.length;
  return {p.x + sequence * p.strides[0] + position * p.strides[1],
          p.positions ? __ldg(p.positions + token) : static_cast<int64_t>(position), token, first,
          min(kCount, p.num_heads - first)};
}

/// How eight features turn, which are the same of all heads of a token.
struct Turn {
  float cos[8], sin[8];  // sin as it multiplies the other feature of a pair
  int other_lane;        // which has these
  bool turns;

  template <bool kAdjoint>
  __device__ __forceinline__ void load(const HeadsParams& p, int64_t line, int column) {
    const int at = column - p.first_turn, lanes = p.num_turns / 8;
    const bool is_first = at >= 0 && at < p.num_turns,
               is_second = at >= p.num_turns && at < 2 * p.num_turns;
    turns = is_first || is_second;
    other_lane = static_cast<int>(threadIdx.x % 32) + (is_first ? lanes : is_second ? -lanes : 0);
    if (!turns) return;
    const int64_t angle = line * p.num_turns + (is_first ? at : at - p.num_turns);
    load_weight(p.cos + angle, 0, cos), load_weight(p.sin + angle, 0, sin);
#pragma unroll
    for (int i = 0; i < 8; ++i) sin[i] = is_first != kAdjoint ? -sin[i] : sin[i];
  }
  /// All threads of the warp call it.
  __device__ __forceinline__ void operator()(float (&v)[8]) const {
    float other[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) other[i] = __shfl_sync(~0u, v[i], other_lane);
    if (!turns) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = v[i] * cos[i] + sin[i] * other[i];
  }
};

template <int kLanes>
__device__ __forceinline__ float lane_sum(float v) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) v += __shfl_xor_sync(~0u, v, distance);
  return v;
}

template <int kLanes>
__global__ void __launch_bounds__(kHeadThreads, 2) norm_rope_kernel(const HeadsParams p) {
  constexpr unsigned kGroups = kHeadThreads / kLanes;
  const int column = threadIdx.x % kLanes * 8;
  const HeadRun run = run_of<kHeadsAhead>(p, blockIdx.x * kGroups + threadIdx.x / kLanes);
  uint4 held[kHeadsAhead];
#pragma unroll
  for (unsigned h = 0; h < kHeadsAhead; ++h)
    held[h] = h < run.count ? load16(run.x + (run.first + h) * p.strides[2] + column) : uint4{};
  Turn turn;
  turn.load<false>(p, run.line, column);
  float w[8];
  load_weight(p.weight, column, w);
  const int64_t at = static_cast<int64_t>(run.token) * p.num_heads + run.first;
#pragma unroll
  for (unsigned h = 0; h < kHeadsAhead; ++h) {
    float v[8], sum = 0.f;
    unpack(held[h], v);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += v[i] * v[i];
    const float r = rsqrtf(lane_sum<kLanes>(sum) / (kLanes * 8) + p.eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= r * w[i];
    turn(v);
    if (h >= run.count) continue;
    if (column == 0) p.r_N[at + h] = r;
    store16(p.y + (at + h) * (kLanes * 8) + column, packed(v));
  }
}

/// As norm_backward_kernel, of dy that is turned back.
template <int kLanes>
__global__ void __launch_bounds__(kBackThreads, 3) norm_rope_backward_kernel(const HeadsParams p) {
  constexpr unsigned kGroups = kBackThreads / kLanes, kHeadWidth = kLanes * 8;
  __shared__ float sums[kGroups][kHeadWidth];
  const int column = threadIdx.x % kLanes * 8, group = threadIdx.x / kLanes;
  float w[8], d_weight[8] = {};
  load_weight(p.weight, column, w);
  for (unsigned first = blockIdx.x * kGroups; first < p.num_tokens * p.num_runs;
       first += gridDim.x * kGroups) {
    const HeadRun run = run_of<kHeadsBack>(p, first + group);
    const int64_t at = static_cast<int64_t>(run.token) * p.num_heads + run.first;
    uint4 x[kHeadsBack], dy[kHeadsBack];
    float r[kHeadsBack];
#pragma unroll
    for (unsigned h = 0; h < kHeadsBack; ++h) {
      const bool is_head = h < run.count;
      x[h] = is_head ? load16(run.x + (run.first + h) * p.strides[2] + column) : uint4{};
      dy[h] = is_head ? load16(p.dy + (at + h) * kHeadWidth + column) : uint4{};
      r[h] = is_head ? p.r_N[at + h] : 0.f;
    }
    Turn turn;
    turn.load<true>(p, run.line, column);
#pragma unroll
    for (unsigned h = 0; h < kHeadsBack; ++h) {
      float v[8], g[8], sum = 0.f;
      unpack(x[h], v), unpack(dy[h], g);
      turn(g);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float term = g[i] * v[i] * r[h];
        d_weight[i] += term;
        sum += term * w[i];
      }
      const float along = lane_sum<kLanes>(sum) / kHeadWidth;
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = r[h] * (g[i] * w[i] - v[i] * r[h] * along);
      if (h < run.count) store16(p.y + (at + h) * kHeadWidth + column, packed(v));
    }
  }
  if (!p.terms) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[group][column + i] = d_weight[i];
  __syncthreads();
  if (threadIdx.x >= kHeadWidth) return;
  float total = 0.f;
#pragma unroll 8
  for (unsigned i = 0; i < kGroups; ++i) total += sums[i][threadIdx.x];
  p.terms[static_cast<int64_t>(blockIdx.x) * kHeadWidth + threadIdx.x] = total;
}

int warps_per_row(std::int64_t width) {
  int warps = 1;
  while (warps < kWarps && warps * kWidth < width) warps *= 2;
  return warps;
}

/// f(warps per row as a constant).
template <class F>
Error with_warps(std::int64_t width, F f) {
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

std::int64_t width_of(const Rope& r) { return r.num_kept + 2 * r.num_turns; }

/// f(lanes of a head as a constant).
template <class F>
Error with_lanes(std::int64_t width, F f) {
  switch (width) {
    case 64: return f(std::integral_constant<int, 8>());
    case 128: return f(std::integral_constant<int, 16>());
    default: return f(std::integral_constant<int, 32>());
  }
}

Error complaint(const Rope& r) {
  const std::int64_t width = width_of(r);
  if ((width != 64 && width != 128 && width != 256) || r.num_turns % 8 != 0 ||
      r.num_kept % 8 != 0 || r.interleaved || r.strides[0] % 8 != 0 || r.strides[1] % 8 != 0 ||
      r.strides[2] % 8 != 0 || r.batch * r.length * r.num_heads >= std::int64_t{1} << 31)
    return "a norm before a rotation takes fewer than 2^31 heads of 64, 128 or 256 features, of "
           "which multiples of 8 turn in pairs that lie apart";
  return nullptr;
}

std::int64_t runs_of(const Rope& r, std::int64_t heads) {
  return (r.num_heads + heads - 1) / heads;
}
std::int64_t blocks_for(const Rope& r, std::int64_t heads, std::int64_t threads) {
  const std::int64_t groups = threads / (width_of(r) / 8);
  return (r.batch * r.length * runs_of(r, heads) + groups - 1) / groups;
}
std::int64_t backward_blocks(const Rope& r) {
  const std::int64_t blocks = blocks_for(r, kHeadsBack, kBackThreads);
  return blocks < kMaxHeadBlocks ? blocks : kMaxHeadBlocks;
}

HeadsParams params_of(const Rope& r, std::int64_t heads, const float* weight, const void* x,
                      void* y) {
  return {.x = static_cast<const bf16*>(x),
          .strides = {r.strides[0], r.strides[1], r.strides[2]},
          .weight = weight,
          .cos = r.cos,
          .sin = r.sin,
          .positions = r.positions,
          .num_tokens = static_cast<unsigned>(r.batch * r.length),
          .num_runs = static_cast<unsigned>(runs_of(r, heads)),
          .length = static_cast<unsigned>(r.length),
          .num_heads = static_cast<unsigned>(r.num_heads),
          .first_turn = static_cast<int>(r.leading ? 0 : r.num_kept),
          .num_turns = static_cast<int>(r.num_turns),
          .eps = 0.f,
          .y = static_cast<bf16*>(y),
          .r_N = nullptr,
          .dy = nullptr,
          .terms = nullptr};
}

/// d_weight, if it is wanted: the sum of the blocks' terms; zeros without blocks.
Error add_terms(const float* terms, std::int64_t num_terms, std::int64_t width, float* d_weight,
                Stream stream) {
  return d_weight ? launch(stream, sum_terms, cuda::blocks_for(width, kTermColumns), kThreads,
                           terms, num_terms, width, d_weight)
                  : nullptr;
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
                     .beside = nullptr,
                     .terms = nullptr};
  return with_warps(n.width, [&](auto warps) {
    return launch(stream, norm_kernel<warps>, blocks_for(n), kThreads, p);
  });
}

std::int64_t norm_workspace(const Norm& n) { return n.weight ? backward_blocks(n) * n.width : 0; }

Error norm_backward(const Norm& n, const void* x, const float* r_N, const void* dy,
                    const void* beside, float* workspace, void* dx, float* d_weight,
                    Stream stream) {
  if (Error error = complaint(n)) return error;
  const NormParams p{.x = static_cast<const bf16*>(x),
                     .stride = n.stride,
                     .weight = n.weight,
                     .num_rows = n.num_rows,
                     .width = static_cast<int>(n.width),
                     .eps = n.eps,
                     .y = static_cast<bf16*>(dx),
                     .r_N = const_cast<float*>(r_N),
                     .dy = static_cast<const bf16*>(dy),
                     .beside = static_cast<const bf16*>(beside),
                     .terms = d_weight ? workspace : nullptr};
  const std::int64_t num_blocks = backward_blocks(n);
  Error error = nullptr;
  if (num_blocks > 0)
    error = with_warps(n.width, [&](auto warps) {
      return launch(stream, norm_backward_kernel<warps>, num_blocks, kThreads, p);
    });
  return error ? error : add_terms(workspace, num_blocks, n.width, d_weight, stream);
}

Error norm_rope(const Rope& r, const float* weight, float eps, const void* x, void* y, float* r_N,
                Stream stream) {
  if (Error error = complaint(r)) return error;
  HeadsParams p = params_of(r, kHeadsAhead, weight, x, y);
  p.eps = eps, p.r_N = r_N;
  const std::int64_t num_blocks = blocks_for(r, kHeadsAhead, kHeadThreads);
  if (num_blocks == 0) return nullptr;
  return with_lanes(width_of(r), [&](auto lanes) {
    return launch(stream, norm_rope_kernel<lanes>, num_blocks, kHeadThreads, p);
  });
}

std::int64_t norm_rope_workspace(const Rope& r) { return backward_blocks(r) * width_of(r); }

Error norm_rope_backward(const Rope& r, const float* weight, const void* x, const float* r_N,
                         const void* dy, float* workspace, void* dx, float* d_weight,
                         Stream stream) {
  if (Error error = complaint(r)) return error;
  HeadsParams p = params_of(r, kHeadsBack, weight, x, dx);
  p.r_N = const_cast<float*>(r_N), p.dy = static_cast<const bf16*>(dy);
  p.terms = d_weight ? workspace : nullptr;
  const std::int64_t num_blocks = backward_blocks(r);
  Error error = nullptr;
  if (num_blocks > 0)
    error = with_lanes(width_of(r), [&](auto lanes) {
      return launch(stream, norm_rope_backward_kernel<lanes>, num_blocks, kBackThreads, p);
    });
  return error ? error : add_terms(workspace, num_blocks, width_of(r), d_weight, stream);
}

}  // namespace moesh::kernels::cuda
