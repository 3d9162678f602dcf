#pragma once
// The six grouped GEMMs of a mixture-of-experts layer: one kernel template.
//
//   kernel  output                                 A, 128 wide     B, 256 wide        contraction
//   up      gate, up, act [R, F]                   x               128 W1, 128 W3     D
//   down    y [R, D]                               act             W2                 F
//   dh      d_gate, d_up, act [R, F], d_score [R]  dy              W2, mn-major       D
//   dx      dx [R, D]                              d_gate, d_up    W1, W3, mn-major   F, F
//   dw13    dW1, dW3 [E, F, D], stored transposed  x'              128 d_gate, d_up   rows
//   dw2     dW2 [E, D, F]                          dy'             act                rows
//
// D model, F ffn, E experts, R rows at their experts, sorted by expert without gaps
//
// Nothing is transposed in memory: wgmma reads operands whose contraction runs along the rows
// ("mn-major"). Blocks stay for the whole launch and work in pairs (tiles.h), which share B: each
// loads one half of it and TMA puts that into both. A block is three warp groups:
//
//   0      one thread of warp 0 loads, by TMA; warps 1 to 3 finish: they take the results of a tile
//          from shared memory, apply what is elementwise and store them, under the next tile
//   1, 2   multiply 64 rows of the tile each, 64 x 256 accumulators, and leave them as bf16
//
// A stage is 128 x 64 of A and 256 x 64 of B. `full` counts its arrivals, `empty` its readers in
// both blocks; `done` and `taken` do the same for the two slabs of results.
//
// Rows are gathered by a kernel of their own (rows.cu). Gathering in here by cp.async costs no
// memory traffic, but 10 to 13 points of the tensor cores' time, and the warps which now finish.

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/ptx.h"
#include "moesh/kernels/cuda/tiles.h"

namespace moesh::kernels::cuda {

enum class Gemm { up, down, dh, dx, dw13, dw2 };

template <Gemm kGemm>
struct Flow {
  static constexpr bool kOverRows = kGemm == Gemm::dw13 || kGemm == Gemm::dw2;  // the contraction
  static constexpr bool kMnA = kOverRows;
  static constexpr bool kMnB = kGemm != Gemm::up && kGemm != Gemm::down;
  /// B is 128 columns of one tensor and the same 128 of another: gate and up of a column meet.
  static constexpr bool kTwins = kGemm == Gemm::up || kGemm == Gemm::dw13;
  static constexpr bool kTransposed = kGemm == Gemm::dw13;
  static constexpr int kColumns = kTwins ? kTileN / 2 : kTileN;  // of the output, per tile
};

struct GroupedParams {
  CUtensorMap a[2], b[2], out[2];
  const int* ends_E;  // [E] end of each expert's rows
  int num_experts;
  int height;     // of the outputs where they are weights
  int width;      // columns of an output
  int depth;      // of the contraction, each of num_parts; not where it runs over rows
  int num_parts;  // 1; dx: 2, of a and b
  Elementwise elementwise;
};

namespace grouped {

inline constexpr int kThreads = 384, kMathThreads = 256, kStages = 3;
inline constexpr int kBlockBytes = 64 * 128;  // 64 rows of 128 bytes
inline constexpr int kBytesA = 2 * kBlockBytes, kBytesB = 4 * kBlockBytes;
inline constexpr int kStageBytes = kBytesA + kBytesB;

struct Shared {
  alignas(1024) uint8_t stages[kStages][kStageBytes];
  alignas(1024) uint8_t results[4][2][kBlockBytes];  // [64 columns][slab]: 64 rows of 64 columns
  int row_starts[kMaxExperts + 1], tile_starts[kMaxExperts + 1];
  alignas(8) uint64_t full[kStages], empty[kStages];
  uint64_t done[2], taken[2];
};

/// The ring of stages, as each role walks it.
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

/// Fills the tables of tiles.h; one warp.
__device__ inline void make_tables(Shared& shared, const int* ends_E, int num_experts, int lane) {
  const int per_lane = ceil_div(num_experts, 32), first = lane * per_lane;
  const int last = min(first + per_lane, num_experts);
  int sum = 0;
  for (int e = first; e < last; ++e)
    sum += ceil_div(ends_E[e] - (e > 0 ? ends_E[e - 1] : 0), kTileM);
  int before = sum;  // the sum over the lanes up to this one
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, before, distance);
    if (lane >= distance) before += other;
  }
  before -= sum;
  for (int e = first; e < last; ++e) {
    const int start = e > 0 ? ends_E[e - 1] : 0;
    shared.row_starts[e] = start;
    shared.tile_starts[e] = before;
    before += ceil_div(ends_E[e] - start, kTileM);
    if (e == num_experts - 1) {
      shared.row_starts[num_experts] = ends_E[e];
      shared.tile_starts[num_experts] = before;
    }
  }
}

template <Gemm kGemm>
__device__ __forceinline__ auto make_tiles(const GroupedParams& p, const Shared& shared) {
  const int columns = ceil_div(p.width, Flow<kGemm>::kColumns);
  if constexpr (Flow<kGemm>::kOverRows)
    return WeightTiles{shared.row_starts, p.num_experts, p.height, columns};
  else
    return RowTiles{shared.row_starts, shared.tile_starts, p.num_experts, columns};
}

/// Blocks of depth 64; an expert without rows gets one, of zeros.
template <Gemm kGemm>
__device__ __forceinline__ int num_steps(const GroupedParams& p, const Tile& t) {
  if constexpr (Flow<kGemm>::kOverRows) return max(1, ceil_div(t.num_rows, kTileK));
  return p.num_parts * ceil_div(p.depth, kTileK);
}

// ---- loading ----

/// Starts the loads of one stage. All tensors end where they end: TMA writes zeros for what is
/// outside, so that depth and width need not be multiples of a tile.
template <Gemm kGemm>
__device__ __forceinline__ void load_stage(const GroupedParams& p, const Tile& t, int rank,
                                           int step, uint32_t stage, uint32_t full) {
  using F = Flow<kGemm>;
  const int steps_of_part = ceil_div(p.depth, kTileK);
  const int part = p.num_parts > 1 && step >= steps_of_part;
  const int k = F::kOverRows ? t.first_row + step * kTileK : (step - part * steps_of_part) * kTileK;
  ptx::barrier_expect(full, kStageBytes);
  if constexpr (F::kMnA) {
    for (int block = 0; block < 2; ++block)
      ptx::tma_load(stage + block * kBlockBytes, &p.a[0], t.m + block * 64, k, 0, full);
  } else {
    ptx::tma_load(stage, &p.a[part], k, t.first_row, 0, full);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (t.shared && half != rank) continue;  // the other block brings it
    const CUtensorMap* map = &p.b[F::kTwins ? half : part];
    const int n = t.column * F::kColumns + (F::kTwins ? 0 : half * 128);
    const int expert = F::kOverRows ? 0 : t.expert;
    // 128 rows of a weight, or two blocks of 64 columns
    for (int block = 0; block < (F::kMnB ? 2 : 1); ++block) {
      const uint32_t to = stage + kBytesA + (2 * half + block) * kBlockBytes;
      const int x = F::kMnB ? n + block * 64 : k, y = F::kMnB ? k : n;
      if (t.shared)
        ptx::tma_load_both(to, map, x, y, expert, full);
      else
        ptx::tma_load(to, map, x, y, expert, full);
    }
  }
}

template <Gemm kGemm>
__device__ void load_tiles(const GroupedParams& p, Shared& shared, int rank) {
  const auto tiles = make_tiles<kGemm>(p, shared);
  const uint32_t stages = ptx::shared_address(shared.stages);
  const uint32_t full = ptx::shared_address(shared.full), empty = ptx::shared_address(shared.empty);
  Ring ring;
  for (int index = blockIdx.x / 2; index < tiles.size(); index += gridDim.x / 2) {
    const Tile t = tiles.at(index, rank);
    const int steps = num_steps<kGemm>(p, t);
    for (int step = 0; step < steps; ++step, ring.next()) {
      ptx::barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      load_stage<kGemm>(p, t, rank, step, stages + ring.stage * kStageBytes, full + 8 * ring.stage);
    }
  }
}

// ---- multiplying ----

/// kSteps times 16 of depth, from descriptors of A and B.
template <Gemm kGemm, int kN, int kSteps>
__device__ __forceinline__ void multiply(float (&acc)[kTileN / 2], uint64_t a, uint64_t b,
                                         int accumulate) {
  using F = Flow<kGemm>;
  constexpr int kNextA = (F::kMnA ? 16 * 128 : 32) >> 4, kNextB = (F::kMnB ? 16 * 128 : 32) >> 4;
  ptx::wgmma_begin();
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    ptx::wgmma<kN, F::kMnA, F::kMnB>(acc, a + i * kNextA, b + i * kNextB, accumulate | i);
  ptx::wgmma_commit();
}

/// The last rows of an expert, where the contraction runs over rows. What lies past them in a stage
/// belongs to the next expert: zeros go there in both operands (a NaN times zero is a NaN), up to a
/// multiple of 16 rows. Both warp groups.
__device__ inline void clear_rest(uint32_t stage, int num_rows) {
  const int thread = threadIdx.x - (kThreads - kMathThreads);
  const int num_clear = 16 * max(1, ceil_div(num_rows, 16)) - num_rows;
  for (int line = thread / 8; line < 6 * num_clear; line += kMathThreads / 8) {
    const int row = num_rows + line / 6, block = line % 6;  // two blocks of A, four of B
    ptx::store_shared16(stage + block * kBlockBytes + row * 128 + thread % 8 * 16, uint4{});
  }
  ptx::fence_async();
  ptx::named_barrier(1, kMathThreads);
}

/// The depth of one tile. kN = 0: nothing of this slab exists, the stages are only passed on.
/// `meanwhile` is called while the last steps are multiplied.
template <Gemm kGemm, int kN, class Function>
__device__ __forceinline__ void multiply_tile(const GroupedParams& p, Shared& shared, const Tile& t,
                                              int slab, Ring& ring, float (&acc)[kTileN / 2],
                                              const Function& meanwhile) {
  using F = Flow<kGemm>;
  const uint32_t full = ptx::shared_address(shared.full), empty = ptx::shared_address(shared.empty);
  const uint32_t stages = ptx::shared_address(shared.stages);
  const int lane = threadIdx.x % 32;
  auto release = [&](int stage) {
    if (lane < 2) ptx::barrier_arrive_at(empty + 8 * stage, lane);
  };
  const int steps = num_steps<kGemm>(p, t);
  if constexpr (kN == 0) {
    for (int step = 0; step < steps; ++step, ring.next()) {
      ptx::barrier_wait(full + 8 * ring.stage, ring.phase);
      if (F::kOverRows && (step + 1) * kTileK > t.num_rows)
        clear_rest(stages + ring.stage * kStageBytes, t.num_rows - step * kTileK);
      release(ring.stage);
    }
    meanwhile();
  } else {
    const uint64_t first_a = ptx::matrix_descriptor(stages + slab * kBlockBytes);
    const uint64_t first_b = ptx::matrix_descriptor(stages + kBytesA);
    const int whole = F::kOverRows ? t.num_rows / kTileK : steps;
    int previous = 0;
    for (int step = 0; step < whole; ++step, ring.next()) {
      const uint64_t offset = (ring.stage * kStageBytes) >> 4;
      ptx::barrier_wait(full + 8 * ring.stage, ring.phase);
      multiply<kGemm, kN, 4>(acc, first_a + offset, first_b + offset, step);
      ptx::wgmma_wait<1>();  // the step before this one has read its stage
      if (step > 0) release(previous);
      previous = ring.stage;
    }
    meanwhile();
    ptx::wgmma_wait<0>();
    if (whole > 0) release(previous);
    if (F::kOverRows && whole < steps) {
      const uint64_t offset = (ring.stage * kStageBytes) >> 4;
      const int rest = t.num_rows - whole * kTileK, sixteens = max(1, ceil_div(rest, 16));
      ptx::barrier_wait(full + 8 * ring.stage, ring.phase);
      clear_rest(stages + ring.stage * kStageBytes, rest);
      const uint64_t a = first_a + offset, b = first_b + offset;
      // Four times a fixed number: ptxas serialises wgmma in a loop of unknown length.
      if (sixteens == 1) multiply<kGemm, kN, 1>(acc, a, b, whole);
      if (sixteens == 2) multiply<kGemm, kN, 2>(acc, a, b, whole);
      if (sixteens == 3) multiply<kGemm, kN, 3>(acc, a, b, whole);
      if (sixteens == 4) multiply<kGemm, kN, 4>(acc, a, b, whole);
      ptx::wgmma_wait<0>();
      release(ring.stage);
      ring.next();
    }
    ptx::wgmma_end(acc);
  }
}

/// A warp group: multiplies its slab of every tile and leaves it as bf16 in shared.results.
template <Gemm kGemm>
__device__ void multiply_tiles(const GroupedParams& p, Shared& shared, int rank, int slab) {
  using F = Flow<kGemm>;
  const auto tiles = make_tiles<kGemm>(p, shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t done = ptx::shared_address(&shared.done[slab]);
  const uint32_t taken = ptx::shared_address(&shared.taken[slab]);
  const uint32_t results = ptx::shared_address(shared.results[0][slab]);
  // Where this lane's row of four 8x8 matrices lies in a block of 64 columns (or, transposed,
  // rows).
  const int part = lane / 16, row = F::kTransposed ? part * 8 + lane % 8 : warp * 16 + lane % 16;
  const int chunk = F::kTransposed ? warp * 2 + lane / 8 % 2 : part;

  float acc[kTileN / 2];
  Ring ring;
  uint32_t phase = 0;
  const int size = tiles.size(), stride = gridDim.x / 2;
  int index = blockIdx.x / 2;
  Tile next = index < size ? tiles.at(index, rank) : Tile{};
  while (index < size) {
    const Tile t = next;
    index += stride;
    // To find a tile takes some 600 cycles, as many as half a step of multiplications: not between
    // two tiles.
    const auto find_next = [&] {
      if (index < size) next = tiles.at(index, rank);
    };
    const bool half = !F::kTwins && p.width - t.column * kTileN <= kTileN / 2;
    if (t.height <= slab * kSlab) {
      multiply_tile<kGemm, 0>(p, shared, t, slab, ring, acc, find_next);
      continue;
    }
    if (!F::kTwins && half)
      multiply_tile<kGemm, kTileN / 2>(p, shared, t, slab, ring, acc, find_next);
    else
      multiply_tile<kGemm, kTileN>(p, shared, t, slab, ring, acc, find_next);

    ptx::barrier_wait(taken, phase ^ 1);
    phase ^= 1;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (half && block >= 2) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // 16 columns
        const float* v = acc + block * 32 + j * 8;
        const uint32_t to =
            results + block * 2 * kBlockBytes +
            (F::kTransposed ? swizzled(row + j * 16, chunk) : swizzled(row, chunk + j * 2));
        ptx::store_matrices<F::kTransposed>(to, ptx::pack(v[0], v[1]), ptx::pack(v[2], v[3]),
                                            ptx::pack(v[4], v[5]), ptx::pack(v[6], v[7]));
      }
    }
    ptx::fence_async();
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(done);
  }
}

// ---- finishing ----

/// TMA stores blocks of 64 rows and 64 columns; it leaves out columns past the end, and rows where
/// they are those of a weight. The finishers take turns.
template <Gemm kGemm>
__device__ __forceinline__ void store_by_tma(const GroupedParams& p, const Slab& s,
                                             uint32_t results, int slab, int finisher) {
  using F = Flow<kGemm>;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const int column = s.first_column + (F::kTwins ? block % 2 : block) * 64;
    if ((block + slab) % kFinishers != finisher || column >= p.width) continue;
    const CUtensorMap* map = &p.out[F::kTwins ? block / 2 : 0];
    const uint32_t from = results + block * kResultBlock;
    if constexpr (F::kTransposed)
      ptx::tma_store(map, s.first_row, column, s.expert, from);
    else
      ptx::tma_store(map, column, s.first_row, F::kOverRows ? s.expert : 0, from);
  }
  ptx::tma_store_commit();
}

/// One of the warps that divide the slabs of results.
template <Gemm kGemm, bool kPlain>
__device__ void finish_tiles(const GroupedParams& p, Shared& shared, int rank, int finisher) {
  using F = Flow<kGemm>;
  const auto tiles = make_tiles<kGemm>(p, shared);
  const int lane = threadIdx.x % 32;
  const uint32_t done = ptx::shared_address(shared.done), taken = ptx::shared_address(shared.taken);
  uint32_t phases = 0;  // a bit per slab
  for (int index = blockIdx.x / 2; index < tiles.size(); index += gridDim.x / 2) {
    const Tile t = tiles.at(index, rank);
#pragma unroll 1
    for (int slab = 0; slab < 2; ++slab) {
      if (t.height <= slab * kSlab) continue;
      const Slab s{.expert = t.expert,
                   .first_row = t.m + slab * kSlab,
                   .num_rows = min(kSlab, t.height - slab * kSlab),
                   .first_column = t.column * F::kColumns,
                   .width = p.width,
                   .column_tile = t.column};
      const uint32_t results = ptx::shared_address(shared.results[0][slab]);
      const int first_row = first_row_of(slab, finisher, lane);
      ptx::barrier_wait(done + 8 * slab, phases >> slab & 1);
      // The rows after an expert's last belong to the next: what is not whole is stored by rows.
      const bool by_tma =
          (F::kOverRows || s.num_rows == kSlab) && !(kGemm == Gemm::down && p.elementwise.bias[0]);
      if (by_tma && lane == 0) store_by_tma<kGemm>(p, s, results, slab, finisher);
      if constexpr (kGemm == Gemm::up)
        finish_up<kPlain>(p.elementwise, s, results, lane, first_row, !by_tma);
      else if (!by_tma)
        finish_rows(p.elementwise, s, results, lane, first_row);
      if (lane == 0) ptx::tma_store_wait_read();
      phases ^= 1u << slab;
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(taken + 8 * slab);
    }
  }
  if (lane == 0) ptx::tma_store_wait();
}

/// The same for dh, which takes both slabs as one: its loads run ahead from one to the other.
template <bool kPlain>
__device__ void finish_dh_tiles(const GroupedParams& p, Shared& shared, int rank, int finisher) {
  const auto tiles = make_tiles<Gemm::dh>(p, shared);
  const int lane = threadIdx.x % 32;
  const uint32_t done = ptx::shared_address(shared.done), taken = ptx::shared_address(shared.taken);
  uint32_t phases = 0;  // a bit per slab
  for (int index = blockIdx.x / 2; index < tiles.size(); index += gridDim.x / 2) {
    const Tile t = tiles.at(index, rank);
    if (t.height <= 0) continue;
    const Slab s{.expert = t.expert,
                 .first_row = t.m,
                 .num_rows = t.height,
                 .first_column = t.column * kTileN,
                 .width = p.width,
                 .column_tile = t.column};
    FinishDh<kPlain> finish(p.elementwise, s, lane, first_row_of(0, finisher, lane));
#pragma unroll 1
    for (int slab = 0; slab < 2 && t.height > slab * kSlab; ++slab) {
      ptx::barrier_wait(done + 8 * slab, phases >> slab & 1);
      phases ^= 1u << slab;
      finish(ptx::shared_address(shared.results), slab * kSlab + kSlab);
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(taken + 8 * slab);
    }
  }
}

template <Gemm kGemm, bool kPlain>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ GroupedParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_group = warp / 4;
  const int rank = static_cast<int>(ptx::cluster_rank());
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(ptx::shared_address(&shared.full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&shared.empty[i]), 2 * kMathThreads / 32);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(ptx::shared_address(&shared.done[i]), 4);
      ptx::barrier_init(ptx::shared_address(&shared.taken[i]), kFinishers);
    }
    ptx::barrier_init_fence();
  }
  if (warp == 1) make_tables(shared, p.ends_E, p.num_experts, lane);
  ptx::cluster_sync();

  if (warp_group == 0) {
    ptx::give_registers<kPlain ? 120 : 136>();
    if (warp == 0) {
      if (lane == 0) load_tiles<kGemm>(p, shared, rank);
    } else if constexpr (kGemm == Gemm::dh) {
      finish_dh_tiles<kPlain>(p, shared, rank, warp - 1);
    } else {
      finish_tiles<kGemm, kPlain>(p, shared, rank, warp - 1);
    }
  } else {
    ptx::take_registers<kPlain ? 192 : 184>();
    multiply_tiles<kGemm>(p, shared, rank, warp_group - 1);
  }
  __syncwarp();
  ptx::cluster_sync();  // nobody leaves while the other block may still write to it
}

}  // namespace grouped
}  // namespace moesh::kernels::cuda
