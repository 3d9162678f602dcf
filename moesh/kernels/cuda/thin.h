#pragma once
// A GEMM with few columns: a block multiplies 128 x kN, kN 64 or 128, and B is a sum of bf16 terms
// (a float32 number is the sum of three, its first eight bits, the next eight and the last), all
// added up in one accumulator. Two warp groups multiply 64 rows each, one more warp loads.
//   kMn = false   A [M, K] and B [kN, K]: the terms are matrices of a stack
//   kMn = true    A [K, M] and B [K, kN]: the terms are columns of one matrix

#include "moesh/kernels/cuda/ptx.h"
#include "moesh/kernels/cuda/tiles.h"

namespace moesh::kernels::cuda::thin {

inline constexpr int kMathThreads = 256, kThreads = kMathThreads + 32;
inline constexpr int kBlockBytes = 64 * 128;

struct Operands {
  CUtensorMap a, b;
  int term_columns[3];  // kMn: where each term of B begins
};

template <int kN, int kTerms, int kMostStages = 4>
struct Shape {
  static constexpr int kTermBytes = kN * 128;
  static constexpr int kStageBytes = 2 * kBlockBytes + kTerms * kTermBytes;
  static constexpr int kStages = smaller(kMostStages, 224 * 1024 / kStageBytes);
  static constexpr int kBytes = kStages * kStageBytes + 2 * 8 * kStages;
};

/// The sum over steps [first, last) of depth 64 into acc; the rows of A begin at m, the columns of
/// each term of B at n. `memory` is Shape::kBytes, aligned to 1024. All kThreads call it; those of
/// the first two warp groups get results. Afterwards the memory is free, and all have come
/// together.
template <int kN, int kTerms, bool kMn, int kMostStages = 4>
__device__ __forceinline__ void multiply(const Operands& o, uint8_t* memory, int m, int n,
                                         int first, int last, float (&acc)[kN / 2]) {
  static_assert(kN <= 128);  // of 256 there would be no registers for sums apart
  using S = Shape<kN, kTerms, kMostStages>;
  const uint32_t stages = ptx::shared_address(memory);
  const uint32_t full = stages + S::kStages * S::kStageBytes, empty = full + 8 * S::kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      ptx::barrier_init(full + 8 * i, 1);
      ptx::barrier_init(empty + 8 * i, kMathThreads / 32);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int stage = 0;
  uint32_t phase = 0;
  auto next = [&] {
    if (++stage == S::kStages) stage = 0, phase ^= 1;
  };
  if (warp == kMathThreads / 32) {
    for (int step = first; lane == 0 && step < last; ++step, next()) {
      const uint32_t to = stages + stage * S::kStageBytes, ready = full + 8 * stage;
      const int k = step * kTileK;
      ptx::barrier_wait(empty + 8 * stage, phase ^ 1);
      ptx::barrier_expect(ready, S::kStageBytes);
      if constexpr (kMn) {
        for (int block = 0; block < 2; ++block)
          ptx::tma_load(to + block * kBlockBytes, &o.a, m + block * 64, k, 0, ready);
      } else {
        ptx::tma_load(to, &o.a, k, m, 0, ready);
      }
      for (int term = 0; term < kTerms; ++term) {
        const uint32_t at = to + 2 * kBlockBytes + term * S::kTermBytes;
        if constexpr (kMn) {
          for (int block = 0; block < kN / 64; ++block)
            ptx::tma_load(at + block * kBlockBytes, &o.b, o.term_columns[term] + n + block * 64, k,
                          0, ready);
        } else {
          ptx::tma_load(at, &o.b, k, n, term, ready);
        }
      }
    }
  } else {
    constexpr int kNext = (kMn ? 16 * 128 : 32) >> 4;  // 16 of depth further
    const uint64_t first_a = ptx::matrix_descriptor(stages + warp / 4 * kBlockBytes);
    const uint64_t first_b = ptx::matrix_descriptor(stages + 2 * kBlockBytes);
    // The tensor cores cut off what float32 would round, and so lose a bit of the sum with every
    // addition: a few steps are added up apart.
    constexpr int kApart = 4;
    for (int i = 0; i < kN / 2; ++i) acc[i] = 0.f;
    auto multiply_stage = [&](float(&sum)[kN / 2], int accumulate) {
      const uint64_t offset = (stage * S::kStageBytes) >> 4;
      ptx::barrier_wait(full + 8 * stage, phase);
      ptx::wgmma_begin();
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          ptx::wgmma<kN, kMn, kMn>(sum, first_a + offset + i * kNext,
                                   first_b + offset + ((term * S::kTermBytes) >> 4) + i * kNext,
                                   accumulate | term | i);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_end(sum);
      if (lane == 0) ptx::barrier_arrive(empty + 8 * stage);
    };
    float part[kN / 2];
    for (int step = first; step < last; ++step, next()) {
      const int place = (step - first) % kApart;
      multiply_stage(part, place);
      if (place != kApart - 1 && step + 1 < last) continue;
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) acc[i] += part[i];
    }
  }
  __syncwarp();
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 0; i < 2 * S::kStages; ++i) ptx::barrier_invalidate(full + 8 * i);
}

/// Calls f(row, column, value) for all accumulators of this thread: rows of its block of 128.
template <int kN, class Function>
__device__ __forceinline__ void each_result(const float (&acc)[kN / 2], const Function& f) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) f(row + (i & 2) * 4, column + i / 4 * 8 + (i & 1), acc[i]);
}

}  // namespace moesh::kernels::cuda::thin
