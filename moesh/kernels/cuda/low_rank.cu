// The thin products of LoRA with the rows of experts. Memory bounds them: rows are read once, from
// tokens where these are the rows, and what is small goes through the tensor cores by mma.sync.
//   low_rank      a block has 64 rows of one expert, and all of their columns
//   low_rank_da,  a block has up to kLowRankRows rows of one expert and 512 of their columns, 64 a
//   low_rank_db   warp. Sums of blocks are float32 in a workspace, and are added in order.
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
  float *sums, *low_sums;  // [runs, rank, W], [blocks of columns, R, rank]
  float scale;
  int64_t num_rows;
  int width, num_parts, rank, num_experts;

  __device__ int columns() const { return num_parts * width; }
};

/// Runs of rows of one expert, numbered expert after expert.
struct Run {
  int expert, first, last;  // rows [first, last); expert -1: there are fewer runs
};
__device__ __forceinline__ int runs_of(int rows, int longest) {
  return (rows + longest - 1) / longest;
}
/// Run `number` of those with at most `longest` rows; an expert's are about equally long, in
/// sixteens. Whole warps.
__device__ Run run_at(const int* ends_E, int num_experts, int longest, int number) {
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < num_experts; base += 32) {
    const int e = base + lane;
    const int last = e < num_experts ? ends_E[e] : 0;
    const int first = e > 0 && e < num_experts ? ends_E[e - 1] : 0;
    const int mine = runs_of(last - first, longest);
    int end = mine;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, end, distance);
      if (lane >= distance) end += other;
    }
    const unsigned later = __ballot_sync(~0u, number < end);
    if (later == 0) {
      number -= __shfl_sync(~0u, end, 31);
      continue;
    }
    const int found = __ffs(static_cast<int>(later)) - 1;
    const int begin = __shfl_sync(~0u, first, found), stop = __shfl_sync(~0u, last, found);
    const int runs = __shfl_sync(~0u, mine, found);
    const int at = number - (__shfl_sync(~0u, end, found) - runs);
    const int64_t sixteens = (stop - begin + 15) / 16;
    return {base + found, begin + static_cast<int>(sixteens * at / runs) * 16,
            min(begin + static_cast<int>(sixteens * (at + 1) / runs) * 16, stop)};
  }
  return {-1, 0, 0};
}

__device__ __forceinline__ int token_of(const Params& p, int row) {
  return p.token_R ? p.token_R[row] : row;
}

// ---- low = scale rows a' ----

constexpr int kRowsOfBlock = 64;

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
  const Run run = run_at(p.ends_E, p.num_experts, kRowsOfBlock, blockIdx.x);
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

/// A block takes a run of rows, columns [512 i, 512 i + 512) and kRank of the ranks, block after
/// block of ranks. Warps have their own tiles of 16 rows and 64 columns, two of which are on their
/// way while one is multiplied. kProduct: the products of the rows with b as well.
template <int kRank, bool kProduct>
__global__ void __launch_bounds__(kThreads, kRank > 16 ? 1
                                            : kProduct ? 2
                                                       : 3)
    sums_kernel(const __grid_constant__ Params p) {
  constexpr int kTiles = kColumns / 8, kLowPitch = Tiles<kRank>::kLowPitch;
  extern __shared__ __align__(128) uint8_t memory[];
  Shared<kRank>& shared = *reinterpret_cast<Shared<kRank>*>(memory);
  const Run run = run_at(p.ends_E, p.num_experts, kLowRankRows, blockIdx.y);
  if (run.expert < 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int rank_blocks = (p.rank + kRank - 1) / kRank;
  const int block = blockIdx.x / rank_blocks, first_rank = blockIdx.x % rank_blocks * kRank;
  const int per_part = (p.width + kColumns - 1) / kColumns;
  const int mine = block * kWarps + warp;  // which 64 columns
  const bool exists = mine < p.num_parts * per_part;
  const int part = exists ? mine / per_part : 0, column = exists ? mine % per_part * kColumns : 0;
  const int num_columns = exists ? min(kColumns, p.width - column) : 0;
  const bf16* rows = part == 0 ? p.rows[0] : p.rows[1];
  if (!kProduct && !exists) return;

  // b of this warp's columns, as an mma takes it.
  uint32_t b[kProduct ? kColumns / 16 : 1][kRank / 8][2] = {};
  if constexpr (kProduct) {
    const int64_t all = p.columns();
    const auto half = [&](int c, int k) -> uint32_t {
      const bool inside = c < num_columns && k < p.rank;
      const int64_t at = (run.expert * all + part * p.width + column + c) * p.rank + k;
      return inside ? *reinterpret_cast<const uint16_t*>(p.matrix + at) : 0u;
    };
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step)
#pragma unroll
      for (int tile = 0; tile < kRank / 8; ++tile)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int c = step * 16 + i * 8 + pair * 2, k = first_rank + tile * 8 + group;
          b[step][tile][i] = half(c, k) | half(c + 1, k) << 16;
        }
  }

  const int num_tiles = (run.last - run.first + kTileRows - 1) / kTileRows;
  const auto token_in = [&](int tile) {  // of the row of this lane; -1: none
    const int row = run.first + tile * kTileRows + lane % kTileRows;
    return row < run.last ? token_of(p, row) : -1;
  };
  int token = token_in(0);
  const auto fetch = [&](int tile) {
    if (tile < num_tiles) {
      Tiles<kRank>& to = shared.tiles[warp][tile % kStages];
#pragma unroll
      for (int i = 0; i < kTileRows / 4; ++i) {
        const int row = i * 4 + lane / 8, chunk = lane % 8 * 8;
        const int from = __shfl_sync(~0u, token, row);
        const bool inside = from >= 0 && chunk < num_columns;
        mma::load_async(to.rows + row * kPitch + chunk,
                        rows + (inside ? static_cast<int64_t>(from) * p.width + column + chunk : 0),
                        inside);
      }
#pragma unroll
      for (int i = lane; i < kTileRows * kRank / 8; i += 32) {
        const int row = i / (kRank / 8), k = i % (kRank / 8) * 8;
        const int64_t from = run.first + tile * kTileRows + row;
        const bool inside = from < run.last && first_rank + k < p.rank;
        mma::load_async(to.low + row * kLowPitch + k,
                        p.low_Rr + (inside ? from * p.rank + first_rank + k : 0), inside);
      }
      token = token_in(tile + 1);
    }
    mma::load_commit();
  };

  float sum[kRank / 16][kTiles][4] = {};
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
      auto& of_warps = shared.low_sums[tile % 2];
      mma::each_pair(low, [&](int row, int k, float x, float y) {
        *reinterpret_cast<float2*>(&of_warps[warp][row][k]) = {x, y};
      });
      __syncthreads();
      for (int i = threadIdx.x; i < kTileRows * kRank; i += kThreads) {
        const int row = i / kRank, k = i % kRank;
        const int64_t to = run.first + tile * kTileRows + row;
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) total += of_warps[w][row][k];
        if (to < run.last && first_rank + k < p.rank)
          p.low_sums[(block * p.num_rows + to) * p.rank + first_rank + k] = total;
      }
    }
  }
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * p.rank + first_rank) * p.columns() +
                        part * p.width + column;
#pragma unroll
  for (int i = 0; i < kRank / 16; ++i)
    mma::each_pair(sum[i], [&](int k, int c, float x, float y) {
      if (c < num_columns && first_rank + i * 16 + k < p.rank)
        *reinterpret_cast<float2*>(p.sums + first + static_cast<int64_t>(i * 16 + k) * p.columns() +
                                   c) = {x, y};
    });
}

__device__ __forceinline__ void add8(float (&sum)[8], const float* from) {
  const float4 a = reinterpret_cast<const float4*>(from)[0],
               b = reinterpret_cast<const float4*>(from)[1];
  sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
  sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
}

/// Eight sums over the runs of an expert: columns side by side of one rank, or ranks of one column.
template <bool kIsB>
__global__ void __launch_bounds__(kThreads) add_sums(const Params p) {
  const int expert = blockIdx.y, lane = threadIdx.x % 32, columns = p.columns();
  int before = 0;  // runs of the experts before this one
  for (int e = lane; e < expert; e += 32)
    before += runs_of(p.ends_E[e] - (e > 0 ? p.ends_E[e - 1] : 0), kLowRankRows);
  for (int distance = 16; distance > 0; distance /= 2)
    before += __shfl_xor_sync(~0u, before, distance);
  const int runs =
      runs_of(p.ends_E[expert] - (expert > 0 ? p.ends_E[expert - 1] : 0), kLowRankRows);
  const int at = blockIdx.x * kThreads + threadIdx.x;
  const int wide = kIsB ? columns : columns / 8;  // how many eights are side by side
  if (at >= wide * (kIsB ? p.rank / 8 : p.rank)) return;
  const int k = at / wide * (kIsB ? 8 : 1), column = at % wide * (kIsB ? 1 : 8);
  float sum[8] = {};
  for (int run = 0; run < runs; ++run) {
    const float* from =
        p.sums + (static_cast<int64_t>(before + run) * p.rank + k) * columns + column;
    if constexpr (kIsB) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += from[static_cast<int64_t>(i) * columns];
    } else {
      add8(sum, from);
    }
  }
  const int64_t first = static_cast<int64_t>(expert) * columns * p.rank;
  store16(p.out + first +
              (kIsB ? static_cast<int64_t>(column) * p.rank + k
                    : static_cast<int64_t>(k) * columns + column),
          packed(sum));
}

/// Eight products of a row, from the sums of all blocks of columns.
__global__ void __launch_bounds__(kThreads) add_low_sums(const Params p, int num_blocks) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (at >= p.ends_E[p.num_experts - 1] * static_cast<int64_t>(p.rank)) return;
  float sum[8] = {};
  for (int block = 0; block < num_blocks; ++block) {
    const float* from = p.low_sums + block * p.num_rows * p.rank + at;
    add8(sum, from);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] *= p.scale;
  store16(p.out_low + at, packed(sum));
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

unsigned blocks_for(int64_t size) {
  return static_cast<unsigned>((size + kThreads - 1) / kThreads);
}

template <int kRank, bool kProduct>
Error launch_sums(const Params& p, int num_blocks, cudaStream_t queue) {
  static Prepared prepared;
  constexpr int kBytes = shared_bytes<kRank, kProduct>();
  int on_device = 0;
  const auto kernel = sums_kernel<kRank, kProduct>;
  if (Error error = prepared(kernel, kThreads, kBytes, 1, on_device)) return error;
  const auto rank_blocks = static_cast<unsigned>((p.rank + kRank - 1) / kRank);
  const auto runs = static_cast<unsigned>(p.num_rows / kLowRankRows + p.num_experts);
  kernel<<<dim3(num_blocks * rank_blocks, runs), kThreads, kBytes, queue>>>(p);
  return text_of(cudaGetLastError());
}

/// Sums over rows, and with kIsB the products with b.
template <bool kIsB>
Error sums(const Params& p, Stream stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const int64_t size = static_cast<int64_t>(p.num_parts) * p.width * p.rank;
  if (p.num_rows == 0)
    return text_of(cudaMemsetAsync(p.out, 0, p.num_experts * size * sizeof(bf16), queue));
  const auto num_blocks = static_cast<int>(low_rank_blocks(p.width, p.num_parts));
  if (Error error = p.rank <= 16 ? launch_sums<16, kIsB>(p, num_blocks, queue)
                                 : launch_sums<32, kIsB>(p, num_blocks, queue))
    return error;
  add_sums<kIsB>
      <<<dim3(blocks_for(size / 8), static_cast<unsigned>(p.num_experts)), kThreads, 0, queue>>>(p);
  if (kIsB)
    add_low_sums<<<blocks_for(p.num_rows * p.rank / 8), kThreads, 0, queue>>>(p, num_blocks);
  return text_of(cudaGetLastError());
}

}  // namespace

Error low_rank(const LowRank& l, const void* a_ErW, float scale, void* low_Rr, Stream stream) {
  if (Error error = refused(l)) return error;
  if (l.num_rows == 0) return nullptr;
  Params p = params_of(l);
  p.matrix = static_cast<const bf16*>(a_ErW), p.out_low = static_cast<bf16*>(low_Rr);
  p.scale = scale;
  const auto queue = static_cast<cudaStream_t>(stream);
  const auto runs = static_cast<unsigned>(l.num_rows / kRowsOfBlock + l.num_experts);
  if (l.rank <= 16)
    low_rank_kernel<16><<<runs, kThreads, 0, queue>>>(p);
  else if (l.rank <= 32)
    low_rank_kernel<32><<<runs, kThreads, 0, queue>>>(p);
  else
    low_rank_kernel<64><<<runs, kThreads, 0, queue>>>(p);
  return text_of(cudaGetLastError());
}

Error low_rank_da(const LowRank& l, const void* d_low_Rr, float* workspace, void* da_ErW,
                  Stream stream) {
  if (Error error = refused(l)) return error;
  Params p = params_of(l);
  p.low_Rr = static_cast<const bf16*>(d_low_Rr), p.out = static_cast<bf16*>(da_ErW);
  p.sums = workspace;
  return sums<false>(p, stream);
}

Error low_rank_db(const LowRank& l, const void* b_EWr, const void* low_Rr, float scale,
                  float* workspace, void* db_EWr, void* d_low_Rr, Stream stream) {
  if (Error error = refused(l)) return error;
  Params p = params_of(l);
  p.matrix = static_cast<const bf16*>(b_EWr), p.low_Rr = static_cast<const bf16*>(low_Rr);
  p.out = static_cast<bf16*>(db_EWr), p.out_low = static_cast<bf16*>(d_low_Rr);
  p.scale = scale, p.sums = workspace;
  p.low_sums = workspace + low_rank_da_workspace(l);
  return sums<true>(p, stream);
}

}  // namespace moesh::kernels::cuda
