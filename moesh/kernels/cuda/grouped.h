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
// up8, down8 and dx8 are the same in float8 (float8.h), of which a stage is 128 deep. To wgmma both
// operands must be K-major, so what was mn-major comes as a transposed copy, and dh is a down8:
// what follows it is a pass of its own. TMA sees two codes as one bf16. Tensor cores sum 128 of
// depth, 64 x 128 of the slab at a time; times the scales of the row and of the block of B these
// are added up in registers, while the other warp group multiplies.
//
// What LoRA adds is a tail of the contraction, its rank deep: A from its rows, B from its matrix.
//
// Rows are gathered by a kernel of their own (rows.cu). Gathering in here by cp.async costs no
// memory traffic, but 10 to 13 points of the tensor cores' time, and the warps which now finish.

#include <climits>

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/ptx.h"
#include "moesh/kernels/cuda/tiles.h"

namespace moesh::kernels::cuda {

enum class Gemm { up, down, dh, dx, dw13, dw2, up8, down8, dx8 };

template <Gemm kGemm>
struct Flow {
  static constexpr bool kOverRows = kGemm == Gemm::dw13 || kGemm == Gemm::dw2;  // the contraction
  static constexpr bool kFloat8 = kGemm == Gemm::up8 || kGemm == Gemm::down8 || kGemm == Gemm::dx8;
  static constexpr bool kMnA = kOverRows;
  static constexpr bool kMnB = kGemm != Gemm::up && kGemm != Gemm::down && !kFloat8;
  /// B is 128 columns of one tensor and the same 128 of another: gate and up of a column meet.
  static constexpr bool kTwins = kGemm == Gemm::up || kGemm == Gemm::up8 || kGemm == Gemm::dw13;
  static constexpr bool kTransposed = kGemm == Gemm::dw13;
  static constexpr int kColumns = kTwins ? kTileN / 2 : kTileN;  // of the output, per tile
};

/// The scales of a weight's blocks, of which each is 128 x 128: [E, columns / 128, depth / 128], or
/// with the last two the other way round.
struct BlockScales {
  const float* first;
  int64_t next_expert;
  int next_column, next_depth;
};

struct GroupedParams {
  CUtensorMap a[2], b[2], out[2];
  const int* ends_E;  // [E] end of each expert's rows
  int num_experts;
  int height;      // of the outputs where they are weights
  int width;       // columns of an output
  int depth;       // of the contraction, each of num_parts; not where it runs over rows
  int num_parts;   // 1; dx: 2, of a and b
  int tail_depth;  // of what LoRA adds; with a tail: not 0
  // Where the contraction runs over rows: the sums of chunks [max_chunk_pairs, block, slab, 64 x
  // 256], and how many of a tile's are there, [max_chunk_pairs, block, slab].
  int max_chunk_pairs;
  float4* chunk_sums;
  int* chunk_counts;
  Elementwise elementwise;
  // In float8: depth counts pairs of codes.
  CUtensorMap scales_a[2];  // [steps, R]
  BlockScales scales_b[2];
  int num_rows;  // of one group, where ends_E is null
  CUtensorMap tail_a, tail_b;
};

namespace grouped {

inline constexpr int kThreads = 384, kMathThreads = 256, kStages = 3;
inline constexpr int kBlockBytes = 64 * 128;  // 64 rows of 128 bytes
inline constexpr int kBytesA = 2 * kBlockBytes, kBytesB = 4 * kBlockBytes;
inline constexpr int kStageBytes = kBytesA + kBytesB;
// TMA begins at multiples of 16 bytes, and so up to three rows before the tile.
inline constexpr int kScales = kTileM + 4, kScaleBytes = kScales * sizeof(float);

struct Shared {
  alignas(1024) uint8_t stages[kStages][kStageBytes];
  alignas(1024) uint8_t results[4][2][kBlockBytes];  // [64 columns][slab]: 64 rows of 64 columns
  union {
    alignas(16) uint8_t dh_inputs[kFinishers][FinishDh<true>::kBytes];
    struct {
      struct {
        alignas(128) float rows[kScales];
      } a[kStages];
      float b[kStages][2];
    } scales;
  };
  int row_starts[kMaxExperts + 1], pair_starts[kMaxExperts + 1], experts[kMaxExperts];  // tiles.h
  int extra, num_cut;      // left_over, or longest
  int times[kCandidates];  // of the candidates for it
  int arrived[2];          // by slab: the chunks that came before this one
  bool unfinished[2];      // by slab: there are no results, as a chunk is still to come
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

/// The sum of `value` over the lanes before this one.
__device__ __forceinline__ int sum_before(int value, int lane) {
  int sum = value;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  return sum - value;
}

/// The tables of RowTiles. Every lane of one warp takes experts that follow each other.
__device__ inline void make_row_tables(Shared& shared, int num_experts, int lane) {
  const int per_lane = ceil_div(num_experts, 32), first = smaller(lane * per_lane, num_experts);
  const int last = smaller(first + per_lane, num_experts);
  const auto num_tiles = [&](int e) {
    return ceil_div(shared.row_starts[e + 1] - shared.row_starts[e], kTileM);
  };
  int num_odd = 0, single = -1;
  for (int e = first; e < last; ++e)
    if (num_tiles(e) % 2 == 1) ++num_odd, single = e;
  // The expert that waits for a second one when this lane begins.
  const int odd_before = sum_before(num_odd, lane);
  const unsigned with_odd = __ballot_sync(~0u, num_odd > 0),
                 earlier = with_odd & ((1u << lane) - 1);
  const int before = __shfl_sync(~0u, single, earlier ? 31 - __clz(earlier) : 0);
  int waiting = odd_before % 2 == 1 ? before : -1, pairs = 0;
  for (int e = first; e < last; ++e) {
    pairs += num_tiles(e) / 2;
    if (num_tiles(e) % 2 == 0) continue;
    shared.experts[e] = waiting;
    pairs += waiting >= 0;
    waiting = waiting >= 0 ? -1 : e;
  }
  int start = sum_before(pairs, lane);
  for (int e = first; e < last; ++e) {
    shared.pair_starts[e] = start;
    start += num_tiles(e) / 2 + (num_tiles(e) % 2 == 1 && shared.experts[e] >= 0);
  }
  if (lane == 31) shared.pair_starts[num_experts] = start, shared.extra = waiting;
}

/// The tables of WeightTiles. All threads.
__device__ inline void make_weight_tables(Shared& shared, const GroupedParams& p, int pairs) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_experts = p.num_experts;
  const auto rows_of = [&](int e) { return shared.row_starts[e + 1] - shared.row_starts[e]; };
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    const int rows = rows_of(e);
    int place = 0, start = 0;  // how many have more rows, or equally many and a lower number
#pragma unroll 8
    for (int other = 0; other < num_experts; ++other) {
      const int end = shared.row_starts[other + 1];
      place += end - start > rows || (end - start == rows && other < e);
      start = end;
    }
    shared.experts[place] = e;
  }
  __syncthreads();
  const auto steps_at = [&](int i) { return steps_of(rows_of(shared.experts[i])); };
  const int most = steps_at(0), num_clusters = gridDim.x / 2;
  const bool many = p.max_chunk_pairs == 0 ||
                    has_many_tiles(most, shared.row_starts[num_experts], pairs, num_clusters);
  // Every warp: the time of a candidate. Then all know the best one.
  static_assert(kCandidates <= kThreads / 32);
  if (!many && warp < kCandidates) {
    const int longest = longest_chunk(most, warp);
    int time = 0, start = 0;
    bool fits = true;
    for (int first = 0; first < num_experts; first += 32) {
      const int i = first + lane, steps = i < num_experts ? steps_at(i) : 0;
      const int mine = pairs * num_chunks(steps, longest), begin = start + sum_before(mine, lane);
      if (steps > 0) time += time_of_chunks(steps, begin, pairs, num_clusters, longest);
      fits = fits && (steps <= longest || begin + mine <= p.max_chunk_pairs);
      start = __shfl_sync(~0u, begin + mine, 31);
    }
    fits = __all_sync(~0u, fits);
    for (int distance = 16; distance > 0; distance /= 2)
      time += __shfl_xor_sync(~0u, time, distance);
    if (lane == 0) shared.times[warp] = fits ? time : INT_MAX;
  }
  __syncthreads();
  int best = 0;
  for (int i = 1; i < kCandidates && !many; ++i)
    if (shared.times[i] < shared.times[best]) best = i;
  const int longest = longest_chunk(most, best);
  if (warp != 0) return;
  int start = 0, num_cut = 0;
  for (int first = 0; first < num_experts; first += 32) {
    const int i = first + lane;
    const int chunks = i < num_experts ? num_chunks(steps_at(i), longest) : 0;
    const int mine = pairs * chunks, begin = start + sum_before(mine, lane);
    if (i < num_experts) shared.pair_starts[i] = begin;
    start = __shfl_sync(~0u, begin + mine, 31);
    num_cut += __popc(__ballot_sync(~0u, chunks > 1));
  }
  if (lane == 0) {
    shared.pair_starts[num_experts] = start;
    shared.extra = longest, shared.num_cut = num_cut;
  }
}

template <Gemm kGemm>
__device__ __forceinline__ auto make_tiles(const GroupedParams& p, const Shared& shared) {
  const int columns = ceil_div(p.width, Flow<kGemm>::kColumns);
  if constexpr (Flow<kGemm>::kOverRows)
    return WeightTiles{.row_starts = shared.row_starts,
                       .pair_starts = shared.pair_starts,
                       .order_E = shared.experts,
                       .num_experts = p.num_experts,
                       .height = p.height,
                       .num_columns = columns,
                       .longest = shared.extra,
                       .num_cut = shared.num_cut};
  else
    return RowTiles{.row_starts = shared.row_starts,
                    .pair_starts = shared.pair_starts,
                    .partners = shared.experts,
                    .num_experts = p.num_experts,
                    .num_columns = columns,
                    .left_over = shared.extra};
}

/// Fills the tables of tiles.h; all threads.
template <Gemm kGemm>
__device__ void make_tables(Shared& shared, const GroupedParams& p) {
  for (int e = threadIdx.x; e <= p.num_experts; e += blockDim.x)
    shared.row_starts[e] = e == 0 ? 0 : p.ends_E ? p.ends_E[e - 1] : p.num_rows;
  __syncthreads();
  if constexpr (Flow<kGemm>::kOverRows)
    make_weight_tables(shared, p, make_tiles<kGemm>(p, shared).pairs_of_expert());
  else if (threadIdx.x < 32)
    make_row_tables(shared, p.num_experts, threadIdx.x);
}

/// Blocks of depth 64.
template <Gemm kGemm, bool kTail>
__device__ __forceinline__ int num_steps(const GroupedParams& p, const Tile& t) {
  if constexpr (Flow<kGemm>::kOverRows) return steps_of(t.num_rows);
  const int steps = p.num_parts * ceil_div(p.depth, kTileK);
  return kTail ? steps + ceil_div(p.tail_depth, kTileK) : steps;
}

// ---- loading ----

/// Starts the loads of one stage. All tensors end where they end: TMA writes zeros for what is
/// outside, so that depth and width need not be multiples of a tile.
template <Gemm kGemm, bool kTail>
__device__ __forceinline__ void load_stage(const GroupedParams& p, const Tile& t, int rank,
                                           int step, uint32_t stage, uint32_t scales,
                                           uint32_t full) {
  using F = Flow<kGemm>;
  const int steps_of_part = ceil_div(p.depth, kTileK);
  const bool is_tail = kTail && step >= p.num_parts * steps_of_part;
  const int part = p.num_parts > 1 && step >= steps_of_part;
  const int before = is_tail ? p.num_parts * steps_of_part : part * steps_of_part;
  const int k = F::kOverRows ? t.first_row + step * kTileK : (step - before) * kTileK;
  ptx::barrier_expect(full, kStageBytes + (F::kFloat8 ? kScaleBytes : 0));
  if constexpr (F::kFloat8)
    ptx::tma_load(scales, &p.scales_a[part], t.first_row & ~3, step - before, 0, full);
  if constexpr (F::kMnA) {
    for (int block = 0; block < 2; ++block)
      ptx::tma_load(stage + block * kBlockBytes, &p.a[0], t.m + block * 64, k, 0, full);
  } else {
    ptx::tma_load(stage, is_tail ? &p.tail_a : &p.a[part], k, t.first_row, 0, full);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (t.shared && half != rank) continue;  // the other block brings it
    const CUtensorMap* map = is_tail ? &p.tail_b : &p.b[F::kTwins ? half : part];
    const int n = t.column * F::kColumns + (F::kTwins ? 0 : half * 128);
    // The tail of twins is one tensor, of both halves of one expert after the other.
    const int expert = F::kOverRows ? 0 : is_tail && F::kTwins ? 2 * t.expert + half : t.expert;
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

/// The scales of B's halves at one step. Loaded before the wait for a stage: they come meanwhile.
template <Gemm kGemm>
__device__ __forceinline__ float2 scales_of_b(const GroupedParams& p, const Tile& t, int step) {
  using F = Flow<kGemm>;
  const int steps_of_part = ceil_div(p.depth, kTileK), part = step >= steps_of_part;
  const int last = ceil_div(p.width, kFloat8Tile) - 1;
  const auto at = [&](int tensor, int column) {
    const BlockScales& s = p.scales_b[tensor];
    return __ldg(s.first + t.expert * s.next_expert + min(column, last) * s.next_column +
                 (step - part * steps_of_part) * s.next_depth);
  };
  if constexpr (F::kTwins) return {at(0, t.column), at(1, t.column)};
  return {at(part, 2 * t.column), at(part, 2 * t.column + 1)};
}

template <Gemm kGemm, bool kTail>
__device__ void load_tiles(const GroupedParams& p, Shared& shared, int rank) {
  const auto tiles = make_tiles<kGemm>(p, shared);
  const uint32_t stages = ptx::shared_address(shared.stages);
  const uint32_t full = ptx::shared_address(shared.full), empty = ptx::shared_address(shared.empty);
  Ring ring;
  for (int index = blockIdx.x / 2; index < tiles.size(); index += gridDim.x / 2) {
    const Tile t = tiles.at(index, rank);
    const int steps = num_steps<kGemm, kTail>(p, t);
    for (int step = 0; step < steps; ++step, ring.next()) {
      float2 scales_b;
      if constexpr (Flow<kGemm>::kFloat8) scales_b = scales_of_b<kGemm>(p, t, step);
      ptx::barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      if constexpr (Flow<kGemm>::kFloat8)
        shared.scales.b[ring.stage][0] = scales_b.x, shared.scales.b[ring.stage][1] = scales_b.y;
      load_stage<kGemm, kTail>(p, t, rank, step, stages + ring.stage * kStageBytes,
                               ptx::shared_address(&shared.scales.a[ring.stage]),
                               full + 8 * ring.stage);
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

/// The depth of one tile. Float8: the sum of each step is apart, and added with its scales.
/// kN = 0: nothing of this slab exists, the stages are only passed on.
/// `meanwhile` is called while the last steps are multiplied.
template <Gemm kGemm, bool kTail, int kN, class Function>
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
  const int steps = num_steps<kGemm, kTail>(p, t);
  if constexpr (F::kFloat8 && kN > 0) {
    const uint64_t first_a = ptx::matrix_descriptor(stages + slab * kBlockBytes);
    const uint64_t first_b = ptx::matrix_descriptor(stages + kBytesA);
    const int row = slab * kSlab + threadIdx.x % 128 / 32 * 16 + lane / 4 + t.first_row % 4;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) acc[i] = 0.f;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.next()) {
      const uint64_t offset = (ring.stage * kStageBytes) >> 4;
      ptx::barrier_wait(full + 8 * ring.stage, ring.phase);
      const float low = shared.scales.a[ring.stage].rows[row],
                  high = shared.scales.a[ring.stage].rows[row + 8];
      const float of_b[2] = {shared.scales.b[ring.stage][0], shared.scales.b[ring.stage][1]};
#pragma unroll
      for (int half = 0; half < kN / 128; ++half) {
        float sum[64];
        ptx::wgmma_begin();
#pragma unroll
        for (int i = 0; i < 4; ++i)
          ptx::wgmma_e4m3(sum, first_a + offset + 2 * i,
                          first_b + offset + half * (2 * kBlockBytes >> 4) + 2 * i, i);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_end(sum);
        if (half + 1 == kN / 128) __syncwarp(), release(ring.stage);
        const float scales[2] = {low * of_b[half], high * of_b[half]};
#pragma unroll
        for (int i = 0; i < 64; ++i) acc[half * 64 + i] += scales[i / 2 % 2] * sum[i];
      }
    }
    meanwhile();
  } else if constexpr (kN == 0) {
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
    const int rest_of_tail = kTail ? p.tail_depth % kTileK : 0;
    const int whole = F::kOverRows ? t.num_rows / kTileK : steps - (rest_of_tail > 0);
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
    if ((F::kOverRows || kTail) && whole < steps) {
      const uint64_t offset = (ring.stage * kStageBytes) >> 4;
      const int rest = kTail ? rest_of_tail : t.num_rows - whole * kTileK;
      const int sixteens = max(1, ceil_div(rest, 16));
      ptx::barrier_wait(full + 8 * ring.stage, ring.phase);
      if constexpr (F::kOverRows) clear_rest(stages + ring.stage * kStageBytes, rest);
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

/// The sums of the chunks of a tile, from one warp group: its accumulators as they are, by fours.
struct ChunkSums {
  const GroupedParams& p;
  const Tile& tile;
  int slab, part, next_slot;

  __device__ __forceinline__ float4* at(int chunk) const {
    const int slot = tile.slot + chunk * next_slot;
    return p.chunk_sums + (4ll * slot + part) * (kTileN / 2 / 4) * 128 + threadIdx.x % 128;
  }
  /// Keeps those of this chunk. Whether it is the last one that was missing; does not wait.
  __device__ __forceinline__ bool keep(Shared& shared, const float (&acc)[kTileN / 2]) const {
    float4* to = at(tile.chunk);
#pragma unroll
    for (int i = 0; i < kTileN / 2; i += 4)
      __stcg(to + i / 4 * 128, {acc[i], acc[i + 1], acc[i + 2], acc[i + 3]});
    __threadfence();
    ptx::named_barrier(2 + slab, 128);
    if (threadIdx.x % 128 == 0) {
      shared.arrived[slab] = atomicAdd(p.chunk_counts + 4 * tile.slot + part, 1);
      __threadfence();
    }
    ptx::named_barrier(2 + slab, 128);
    return shared.arrived[slab] == tile.num_chunks - 1;
  }
  /// Accumulators from `first` on, of all chunks, added in their order.
  template <int kSize>
  __device__ __forceinline__ void add(int first, float (&sum)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] = 0.f;
#pragma unroll 2
    for (int chunk = 0; chunk < tile.num_chunks; ++chunk) {
      const float4* from = at(chunk) + first / 4 * 128;
#pragma unroll
      for (int i = 0; i < kSize; i += 4) {
        const float4 v = __ldcg(from + i / 4 * 128);
        sum[i] += v.x, sum[i + 1] += v.y, sum[i + 2] += v.z, sum[i + 3] += v.w;
      }
    }
  }
};

/// A warp group: multiplies its slab of every tile and leaves it as bf16 in shared.results.
template <Gemm kGemm, bool kTail>
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

  const auto store = [&](int j, const float* v) {  // 16 columns
    const uint32_t to =
        results + j / 4 * 2 * kBlockBytes +
        (F::kTransposed ? swizzled(row + j % 4 * 16, chunk) : swizzled(row, chunk + j % 4 * 2));
    ptx::store_matrices<F::kTransposed>(to, ptx::pack(v[0], v[1]), ptx::pack(v[2], v[3]),
                                        ptx::pack(v[4], v[5]), ptx::pack(v[6], v[7]));
  };

  float acc[kTileN / 2];
  Ring ring;
  uint32_t phase = 0;
  const int size = tiles.size(), stride = gridDim.x / 2;
  int index = blockIdx.x / 2;
  Tile next = index < size ? tiles.at(index, rank) : Tile{};
  while (index < size) {
    const Tile t = next;
    index += stride;
    // Finding a tile takes some 600 cycles, as long as half a step of multiplications: not between
    // two tiles.
    const auto find_next = [&] {
      if (index < size) next = tiles.at(index, rank);
    };
    const bool half = !F::kTwins && p.width - t.column * kTileN <= kTileN / 2;
    if (t.height <= slab * kSlab) {
      multiply_tile<kGemm, kTail, 0>(p, shared, t, slab, ring, acc, find_next);
      continue;
    }
    if (!F::kTwins && half)
      multiply_tile<kGemm, kTail, kTileN / 2>(p, shared, t, slab, ring, acc, find_next);
    else
      multiply_tile<kGemm, kTail, kTileN>(p, shared, t, slab, ring, acc, find_next);

    const int num_stores = half ? kTileN / 32 : kTileN / 16;
    bool whole = true;
    if constexpr (F::kOverRows) {
      if (t.num_chunks > 1) {
        whole = false;
        const ChunkSums sums{p, t, slab, 2 * rank + slab, tiles.pairs_of_expert()};
        const bool last = sums.keep(shared, acc);
        ptx::barrier_wait(taken, phase ^ 1);
#pragma unroll 1
        for (int j = 0; last && j < num_stores; j += 2) {
          float sum[16];
          sums.add(j * 8, sum);
          store(j, sum), store(j + 1, sum + 8);
        }
        if (threadIdx.x % 128 == 0) shared.unfinished[slab] = !last;
      }
    }
    if (whole) {
      ptx::barrier_wait(taken, phase ^ 1);
      if (F::kOverRows && threadIdx.x % 128 == 0) shared.unfinished[slab] = false;
#pragma unroll
      for (int j = 0; j < kTileN / 16; ++j)
        if (j < num_stores) store(j, acc + j * 8);
    }
    phase ^= 1;
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
      const bool by_tma = (F::kOverRows || s.num_rows == kSlab) &&
                          !((kGemm == Gemm::down || kGemm == Gemm::down8) && p.elementwise.bias[0]);
      const bool finished = !F::kOverRows || !shared.unfinished[slab];
      if (finished && by_tma && lane == 0) store_by_tma<kGemm>(p, s, results, slab, finisher);
      if constexpr (kGemm == Gemm::up)
        finish_up<kPlain>(p.elementwise, s, results, lane, first_row, !by_tma);
      else if (!by_tma)
        finish_rows<F::kTwins>(p.elementwise, s, results, lane, first_row);
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
    FinishDh<kPlain> finish(p.elementwise, s, lane, first_row_of(0, finisher, lane),
                            ptx::shared_address(shared.dh_inputs[finisher]));
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

/// Registers of a thread that finishes, and of one that multiplies; a block has 65536.
template <Gemm kGemm, bool kPlain>
struct Registers {
  static constexpr bool kOverRows = Flow<kGemm>::kOverRows, kFloat8 = Flow<kGemm>::kFloat8;
  static constexpr int kFinish = kFloat8 ? 72 : kOverRows ? 88 : kPlain ? 120 : 136;
  static constexpr int kMultiply = kFloat8 ? 216 : kOverRows ? 208 : kPlain ? 192 : 184;
};

template <Gemm kGemm, bool kPlain, bool kTail>
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
  make_tables<kGemm>(shared, p);
  ptx::cluster_sync();

  if (warp_group == 0) {
    ptx::give_registers<Registers<kGemm, kPlain>::kFinish>();
    if (warp == 0) {
      if (lane == 0) load_tiles<kGemm, kTail>(p, shared, rank);
    } else if constexpr (kGemm == Gemm::dh) {
      finish_dh_tiles<kPlain>(p, shared, rank, warp - 1);
    } else {
      finish_tiles<kGemm, kPlain>(p, shared, rank, warp - 1);
    }
  } else {
    ptx::take_registers<Registers<kGemm, kPlain>::kMultiply>();
    multiply_tiles<kGemm, kTail>(p, shared, rank, warp_group - 1);
  }
  __syncwarp();
  ptx::cluster_sync();  // no block leaves while the other one may still write to it
}

}  // namespace grouped
}  // namespace moesh::kernels::cuda
