// The thin products of LoRA with the rows of experts. Memory bounds them: rows are read once, from
// tokens where these are the rows, and what is small goes through the tensor cores by mma.sync.
//   low_rank      a block has 64 rows of one expert, and all of their columns
//   low_rank_da,  a block has a range of rows and up to 512 of their columns, 64 a warp. All blocks
//   low_rank_db   have equally many rows, which may be of several experts. Their sums are float32
//                 in a workspace, and are added in order.
// R rows at their experts, sorted by expert, E experts, W columns

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/host.h"
#include "moesh/kernels/cuda/mma.h"

namespace moesh::kernels::cuda {
namespace {

using mma::OperandRows;

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kColumns = kLowRankColumns;
constexpr int kStages = 3;     // of a warp's tiles
constexpr int kTileRows = 16;  // of a warp's tile
static_assert(kWarps == kLowRankWarps);

struct Params {
  const bf16* rows[2];  // the columns of the second follow
  const int* token_R;
  const int* ends_E;
  const bf16* matrix;  // a or b of each expert
  const bf16* low_Rr;  // of low_rank_da, low_rank_db
  bf16 *out, *out_low;
  float *sums, *low_sums;  // [ranges + E, rank, W], [blocks of columns, R, rank]
  float scale;
  int64_t num_rows;
  int width, num_parts, rank, num_experts, num_ranges, num_blocks;

  __device__ int columns() const { return num_parts * width; }
};

__device__ __forceinline__ int token_of(const Params& p, int row) {
  return p.token_R ? p.token_R[row] : row;
}

// ---- low = scale rows a' ----

constexpr int kRowsOfBlock = 64;

/// Rows [first, last) of an expert; expert -1: there are fewer such.
struct Run {
  int expert, first, last;
};
/// Number `number` of the runs of up to kRowsOfBlock rows, expert after expert. Whole warps.
__device__ Run run_at(const Params& p, int number) {
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < p.num_experts; base += 32) {
    const int e = base + lane;
    const int last = e < p.num_experts ? p.ends_E[e] : 0;
    const int first = e > 0 && e < p.num_experts ? p.ends_E[e - 1] : 0;
    const int mine = ceil_div(last - first, kRowsOfBlock);
    int end = mine;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, end, distance);
      if (lane >= distance) end += other;
    }
    const unsigned later = __ballot_sync(~0u, number < end);
    if (later != 0) {
      const int found = __ffs(static_cast<int>(later)) - 1;
      const int at = number - __shfl_sync(~0u, end - mine, found);
      const int begin = __shfl_sync(~0u, first, found) + at * kRowsOfBlock;
      return {base + found, begin, min(begin + kRowsOfBlock, __shfl_sync(~0u, last, found))};
    }
    number -= __shfl_sync(~0u, end, 31);
  }
  return {-1, 0, 0};
}

/// 16 rows and 64 columns of a lane, as an mma takes them but for the order of the columns, which
/// is the same in both operands: a lane has eight columns side by side.
struct Fragment {
  uint4 rows[2][2];  // [row and row + 8][half]

  __device__ __forceinline__ void load(const bf16* const (&from)[2], int column, int width) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        rows[i][half] =
            from[i] && column + 32 * half < width ? load16(from[i] + column + 32 * half) : uint4{};
  }
};
__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/// Four warps have 16 rows each and every other 64 columns, four more the same rows and the rest.
template <int kRank>
__global__ void __launch_bounds__(kThreads, kRank == 16 ? 3 : 1)
    low_rank_kernel(const __grid_constant__ Params p) {
  constexpr int kTiles = kRank / 8;
  __shared__ float halves[4][16][kRank + 8];
  const Run run = run_at(p, blockIdx.x);
  if (run.expert < 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int row = run.first + warp % 4 * 16 + group;
  const auto row_at = [&](int i) {
    return i < run.last ? p.rows[0] + static_cast<int64_t>(token_of(p, i)) * p.width : nullptr;
  };
  const bf16* const from[2] = {row_at(row), row_at(row + 8)};
  const bf16* a = p.matrix + (static_cast<int64_t>(run.expert) * p.rank + group) * p.width;
  float sum[kTiles][4] = {};
  const int begin = warp / 4 * kColumns + pair * 8;
  Fragment next;
  next.load(from, begin, p.width);
#pragma unroll 1
  for (int column = begin; column < p.width + pair * 8; column += 2 * kColumns) {
    const Fragment now = next;
    next.load(from, column + 2 * kColumns, p.width);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = column + 32 * half < p.width;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 b =
            inside && tile * 8 < p.rank
                ? load16(a + static_cast<int64_t>(tile) * 8 * p.width + column + 32 * half)
                : uint4{};
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const uint32_t left[4] = {word(now.rows[0][half], i), word(now.rows[1][half], i),
                                    word(now.rows[0][half], i + 1), word(now.rows[1][half], i + 1)};
          mma::multiply(sum[tile], left, word(b, i), word(b, i + 1));
        }
      }
    }
  }
  float(&other)[16][kRank + 8] = halves[warp % 4];
  if (warp >= 4)
    mma::each_pair(sum,
                   [&](int i, int k, float x, float y) { other[i][k] = x, other[i][k + 1] = y; });
  __syncthreads();
  if (warp >= 4) return;
  mma::each_pair(sum, [&](int i, int k, float x, float y) {
    const int to = run.first + warp * 16 + i;
    if (to >= run.last || k >= p.rank) return;
    *reinterpret_cast<uint32_t*>(p.out_low + static_cast<int64_t>(to) * p.rank + k) =
        ptx::pack(p.scale * (x + other[i][k]), p.scale * (y + other[i][k + 1]));
  });
}

// ---- sums over the rows of an expert ----

constexpr int kPitch = kColumns + mma::kGap;

template <int kRank>
struct Tiles {
  static constexpr int kLowPitch = kRank + mma::kGap;
  bf16 rows[kTileRows * kPitch];
  bf16 low[kTileRows * kLowPitch];
};
template <int kRank>
struct Shared {
  Tiles<kRank> tiles[kWarps][kStages];
  float low_sums[2][kWarps][kTileRows][kRank + 8];  // where wanted; every other tile
};
/// Without low_sums.
template <int kRank, bool kProduct>
constexpr int shared_bytes() {
  return kProduct ? sizeof(Shared<kRank>) : sizeof(Shared<kRank>::tiles);
}

/// Rows of a range, in sixteens; the last ones may have fewer, or none.
__device__ __forceinline__ int range_length(int num_rows, int num_ranges) {
  return max(1, ceil_div(num_rows, 16 * num_ranges)) * 16;
}
/// The expert of a row, from `first` on. Whole warps.
__device__ int expert_of(const Params& p, int row, int first) {
  for (int base = first;; base += 32) {
    const int e = base + static_cast<int>(threadIdx.x) % 32;
    const unsigned after = __ballot_sync(~0u, e < p.num_experts && p.ends_E[e] > row);
    if (after != 0) return base + __ffs(static_cast<int>(after)) - 1;
  }
}

/// What a warp has of the columns and ranks.
struct Share {
  int block;  // of columns
  int part, column, num_columns, first_rank;
};

/// Rows [first, last) of one expert. `turn` counts the tiles of the block.
template <int kRank, bool kProduct>
__device__ __forceinline__ void sum_rows(const Params& p, Shared<kRank>& shared, const Share& s,
                                         int expert, int first, int last, int& turn) {
  constexpr int kTiles = kColumns / 8, kLowPitch = Tiles<kRank>::kLowPitch;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const bf16* rows = s.part == 0 ? p.rows[0] : p.rows[1];

  // b of this warp's columns, as an mma takes it.
  uint32_t b[kProduct ? kColumns / 16 : 1][kRank / 8][2] = {};
  if constexpr (kProduct) {
    const int64_t all = p.columns();
    const auto half = [&](int c, int k) -> uint32_t {
      const bool inside = c < s.num_columns && k < p.rank;
      const int64_t at = (expert * all + s.part * p.width + s.column + c) * p.rank + k;
      return inside ? *reinterpret_cast<const uint16_t*>(p.matrix + at) : 0u;
    };
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step)
#pragma unroll
      for (int tile = 0; tile < kRank / 8; ++tile)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int c = step * 16 + i * 8 + pair * 2, k = s.first_rank + tile * 8 + group;
          b[step][tile][i] = half(c, k) | half(c + 1, k) << 16;
        }
  }

  const int num_tiles = ceil_div(last - first, kTileRows);
  const auto token_in = [&](int tile) {  // of the row of this lane; -1: none
    const int row = first + tile * kTileRows + lane % kTileRows;
    return row < last ? token_of(p, row) : -1;
  };
  int token = token_in(0);
  const auto fetch = [&](int tile) {
    if (tile < num_tiles) {
      Tiles<kRank>& to = shared.tiles[warp][tile % kStages];
#pragma unroll
      for (int i = 0; i < kTileRows / 4; ++i) {
        const int row = i * 4 + lane / 8, chunk = lane % 8 * 8;
        const int from = __shfl_sync(~0u, token, row);
        const bool inside = from >= 0 && chunk < s.num_columns;
        mma::load_async(
            to.rows + row * kPitch + chunk,
            rows + (inside ? static_cast<int64_t>(from) * p.width + s.column + chunk : 0), inside);
      }
#pragma unroll
      for (int i = lane; i < kTileRows * kRank / 8; i += 32) {
        const int k = i % (kRank / 8) * 8, row = i / (kRank / 8);
        const int64_t from = first + tile * kTileRows + row;
        const bool inside = from < last && s.first_rank + k < p.rank;
        mma::load_async(to.low + row * kLowPitch + k,
                        p.low_Rr + (inside ? from * p.rank + s.first_rank + k : 0), inside);
      }
      token = token_in(tile + 1);
    }
    mma::load_commit();
  };

  float sum[kRank / 16][kTiles][4] = {};
  __syncwarp();  // the tiles before these have been read
  for (int i = 0; i < kStages - 1; ++i) fetch(i);
#pragma unroll 1
  for (int tile = 0; tile < num_tiles; ++tile) {
    mma::loaded<kStages - 2>();
    __syncwarp();
    fetch(tile + kStages - 1);
    const Tiles<kRank>& t = shared.tiles[warp][tile % kStages];
#pragma unroll
    for (int i = 0; i < kRank / 16; ++i)
      mma::product<OperandRows::contracted, OperandRows::contracted, kTileRows>(
          sum[i], t.low + i * 16, kLowPitch, t.rows, kPitch);
    if constexpr (kProduct) {
      float low[kRank / 8][4] = {};
      const uint32_t at = mma::address(t.rows + lane % 16 * kPitch + lane / 16 * 8);
#pragma unroll
      for (int step = 0; step < kColumns / 16; ++step) {
        uint32_t left[4];
        mma::load_matrices<false>(left, at + step * 32);
#pragma unroll
        for (int k = 0; k < kRank / 8; ++k)
          mma::multiply(low[k], left, b[step][k][0], b[step][k][1]);
      }
      auto& of_warps = shared.low_sums[turn++ % 2];
      mma::each_pair(low, [&](int row, int k, float x, float y) {
        *reinterpret_cast<float2*>(&of_warps[warp][row][k]) = {x, y};
      });
      __syncthreads();
      for (int i = threadIdx.x; i < kTileRows * kRank; i += kThreads) {
        const int row = i / kRank, k = i % kRank;
        const int64_t to = first + tile * kTileRows + row;
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) total += of_warps[w][row][k];
        if (to < last && s.first_rank + k < p.rank)
          p.low_sums[(s.block * p.num_rows + to) * p.rank + s.first_rank + k] = total;
      }
    }
  }
  // The parts of experts in ranges are numbered by the sum of both numbers, which grows by one with
  // each part.
  const int64_t slot = static_cast<int>(blockIdx.y) + expert;
  float* to = p.sums + (slot * p.rank + s.first_rank) * p.columns() + s.part * p.width + s.column;
#pragma unroll
  for (int i = 0; i < kRank / 16; ++i)
    mma::each_pair(sum[i], [&](int k, int c, float x, float y) {
      if (c < s.num_columns && s.first_rank + i * 16 + k < p.rank)
        *reinterpret_cast<float2*>(to + static_cast<int64_t>(i * 16 + k) * p.columns() + c) = {x,
                                                                                               y};
    });
}

/// A block takes a range of rows, some of the columns and kRank of the ranks. Warps have their own
/// tiles of 16 rows and 64 columns, two of which are on their way while one is multiplied.
/// kProduct: the products of the rows with b as well.
template <int kRank, bool kProduct>
__global__ void __launch_bounds__(kThreads, (kRank > 16 ? 2 : 3) - kProduct)
    sums_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t memory[];
  Shared<kRank>& shared = *reinterpret_cast<Shared<kRank>*>(memory);
  const int rank_blocks = ceil_div(p.rank, kRank), warp = threadIdx.x / 32;
  Share s{.block = static_cast<int>(blockIdx.x) / rank_blocks};
  s.first_rank = static_cast<int>(blockIdx.x) % rank_blocks * kRank;
  const int per_part = ceil_div(p.width, kColumns), all = p.num_parts * per_part;
  const int mine = all * s.block / p.num_blocks + warp;  // blocks differ by one warp at most
  const bool exists = mine < all * (s.block + 1) / p.num_blocks;
  if (exists) {
    s.part = mine / per_part, s.column = mine % per_part * kColumns;
    s.num_columns = min(kColumns, p.width - s.column);
  } else if (!kProduct) {
    return;
  }
  const int num_rows = p.ends_E[p.num_experts - 1], length = range_length(num_rows, p.num_ranges);
  const int first = static_cast<int>(blockIdx.y) * length, end = min(first + length, num_rows);
  int expert = 0, turn = 0;
  for (int row = first; row < end;) {
    expert = expert_of(p, row, expert);
    const int last = min(p.ends_E[expert], end);
    sum_rows<kRank, kProduct>(p, shared, s, expert, row, last, turn);
    row = last;
  }
}

__device__ __forceinline__ void add8(float (&sum)[8], const float* from) {
  const float4 a = reinterpret_cast<const float4*>(from)[0],
               b = reinterpret_cast<const float4*>(from)[1];
  sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
  sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
}

/// The first kernel's sums, added: eight to a thread. First, for each expert, over its parts:
/// columns side by side of one rank, or of b ranks of one column; blocks [E, per_expert]. With b
/// then eight products of a row, over the blocks of columns.
template <bool kIsB>
__global__ void __launch_bounds__(kThreads)
    add_sums(const __grid_constant__ Params p, int per_expert) {
  const int expert = static_cast<int>(blockIdx.x) / per_expert, columns = p.columns();
  const int num_rows = p.ends_E[p.num_experts - 1];
  float sum[8] = {};
  if (kIsB && expert >= p.num_experts) {
    const int64_t block = static_cast<int>(blockIdx.x) - p.num_experts * per_expert;
    const int64_t at = (block * kThreads + threadIdx.x) * 8;
    if (at >= static_cast<int64_t>(num_rows) * p.rank) return;
#pragma unroll 4
    for (int i = 0; i < p.num_blocks; ++i) add8(sum, p.low_sums + i * p.num_rows * p.rank + at);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] *= p.scale;
    store16(p.out_low + at, packed(sum));
    return;
  }
  const int at = static_cast<int>(blockIdx.x) % per_expert * kThreads + threadIdx.x;
  const int wide = kIsB ? columns : columns / 8;  // how many eights are side by side
  if (at >= wide * (kIsB ? p.rank / 8 : p.rank)) return;
  const int k = at / wide * (kIsB ? 8 : 1), column = at % wide * (kIsB ? 1 : 8);
  const int first = expert > 0 ? p.ends_E[expert - 1] : 0, last = p.ends_E[expert];
  const int length = range_length(num_rows, p.num_ranges);
  const int end = last > first ? (last - 1) / length + 1 : 0;
#pragma unroll 4
  for (int range = first / length; range < end; ++range) {
    const float* from =
        p.sums + (static_cast<int64_t>(range + expert) * p.rank + k) * columns + column;
    if constexpr (kIsB) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += from[static_cast<int64_t>(i) * columns];
    } else {
      add8(sum, from);
    }
  }
  const int64_t out = static_cast<int64_t>(expert) * columns * p.rank;
  store16(p.out + out +
              (kIsB ? static_cast<int64_t>(column) * p.rank + k
                    : static_cast<int64_t>(k) * columns + column),
          packed(sum));
}

// ---- the host's side ----

Params params_of(const LowRank& l) {
  return {.rows = {static_cast<const bf16*>(l.rows[0]), static_cast<const bf16*>(l.rows[1])},
          .token_R = l.token_R,
          .ends_E = l.ends_E,
          .num_rows = l.num_rows,
          .width = static_cast<int>(l.width),
          .num_parts = static_cast<int>(l.num_parts),
          .rank = static_cast<int>(l.rank),
          .num_experts = static_cast<int>(l.num_experts)};
}

Error refused(const LowRank& l) {
  if (l.rank < 8 || l.rank > kMaxRank || l.rank % 8 != 0)
    return "the rank is to be a multiple of 8, at most 64";
  if (l.width < 8 || l.width % 8 != 0) return "the width of rows is to be a multiple of 8";
  if (l.num_experts < 1) return "there is to be an expert";
  if (l.num_parts < 1 || l.num_parts > 2) return "rows are to be one tensor or two";
  return nullptr;
}

template <int kRank, bool kProduct>
Error launch_sums(const Params& p, cudaStream_t queue) {
  static Prepared prepared;
  constexpr int kBytes = shared_bytes<kRank, kProduct>();
  int on_device = 0;
  const auto kernel = sums_kernel<kRank, kProduct>;
  if (Error error = prepared(kernel, kThreads, kBytes, 1, on_device)) return error;
  const dim3 blocks(p.num_blocks * ceil_div(p.rank, kRank), p.num_ranges);
  kernel<<<blocks, kThreads, kBytes, queue>>>(p);
  return text_of(cudaGetLastError());
}

/// Sums over rows, and with kIsB the products with b.
template <bool kIsB>
Error sums(const LowRank& l, Params p, float* workspace, Stream stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const int64_t size = l.num_parts * l.width * l.rank;
  if (l.num_rows == 0)
    return text_of(cudaMemsetAsync(p.out, 0, l.num_experts * size * sizeof(bf16), queue));
  p.num_ranges = static_cast<int>(low_rank_ranges(l, kIsB));
  p.num_blocks = static_cast<int>(low_rank_columns(l));
  p.sums = workspace, p.low_sums = workspace + low_rank_sums(l, kIsB);
  static_assert(low_rank_width(16) == 16 && low_rank_width(kMaxRank) == 32);
  if (Error error =
          l.rank <= 16 ? launch_sums<16, kIsB>(p, queue) : launch_sums<32, kIsB>(p, queue))
    return error;
  const unsigned per_expert = blocks_for(size / 8, kThreads),
                 of_rows = kIsB ? blocks_for(l.num_rows * l.rank / 8, kThreads) : 0;
  return launch(stream, add_sums<kIsB>, per_expert * l.num_experts + of_rows, kThreads, p,
                per_expert);
}

}  // namespace

Error low_rank(const LowRank& l, const void* a_ErW, float scale, void* low_Rr, Stream stream) {
  if (Error error = refused(l)) return error;
  if (l.num_rows == 0) return nullptr;
  Params p = params_of(l);
  p.matrix = static_cast<const bf16*>(a_ErW), p.out_low = static_cast<bf16*>(low_Rr);
  p.scale = scale;
  const auto kernel = l.rank <= 16   ? low_rank_kernel<16>
                      : l.rank <= 32 ? low_rank_kernel<32>
                                     : low_rank_kernel<64>;
  return launch(stream, kernel, l.num_rows / kRowsOfBlock + l.num_experts, kThreads, p);
}

Error low_rank_da(const LowRank& l, const void* d_low_Rr, float* workspace, void* da_ErW,
                  Stream stream) {
  if (Error error = refused(l)) return error;
  Params p = params_of(l);
  p.low_Rr = static_cast<const bf16*>(d_low_Rr), p.out = static_cast<bf16*>(da_ErW);
  return sums<false>(l, p, workspace, stream);
}

Error low_rank_db(const LowRank& l, const void* b_EWr, const void* low_Rr, float scale,
                  float* workspace, void* db_EWr, void* d_low_Rr, Stream stream) {
  if (Error error = refused(l)) return error;
  Params p = params_of(l);
  p.matrix = static_cast<const bf16*>(b_EWr), p.low_Rr = static_cast<const bf16*>(low_Rr);
  p.out = static_cast<bf16*>(db_EWr), p.out_low = static_cast<bf16*>(d_low_Rr);
  p.scale = scale;
  return sums<true>(l, p, workspace, stream);
}

}  // namespace moesh::kernels::cuda
