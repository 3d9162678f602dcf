#pragma once
// Products of small matrices in shared memory by the warps of a block: bf16, sums in float32, on
// every GPU of compute capability 8.0 or later. A warp has tiles of 16 rows and 8 columns of the
// result.

#include <cuda_bf16.h>

#include <cstdint>

namespace moesh::kernels::cuda::mma {

using bf16 = __nv_bfloat16;

/// Between a row and the next are 16 bytes, so that eight rows lie in different banks.
inline constexpr int kGap = 8;

__device__ __forceinline__ uint32_t address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// 16 bytes from global to shared memory, zeros where `exists` is false; done after `loaded`.
__device__ __forceinline__ void load_async(bf16* to, const bf16* from, bool exists = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void load_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// All but the last kPending groups of this thread are there.
template <int kPending>
__device__ __forceinline__ void loaded() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// How an operand lies: its rows are rows (or columns) of the result, or are contracted.
enum class OperandRows { kept, contracted };

template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t from) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t low,
                                         uint32_t high) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
}

/// d [16, 8 kTiles] += a b of depth kDepth. `a` is [16, depth] or, its rows contracted, [depth,
/// 16]; `b` is [columns, depth] or [depth, columns]. Pitches are from a row to the next.
template <OperandRows kA, OperandRows kB, int kDepth, int kTiles>
__device__ __forceinline__ void product(float (&d)[kTiles][4], const bf16* a, int a_pitch,
                                        const bf16* b, int b_pitch) {
  static_assert(kTiles % 2 == 0 && kDepth % 16 == 0);
  const int lane = threadIdx.x % 32;
  // The 8 x 8 matrices one below the other first, or one beside the other first.
  const int below_row = lane % 16, below_column = lane / 16 * 8;
  const int beside_row = lane % 8 + lane / 16 * 8, beside_column = lane / 8 % 2 * 8;
  const uint32_t a_at = address(kA == OperandRows::kept ? a + below_row * a_pitch + below_column
                                                        : a + beside_row * a_pitch + beside_column);
  const uint32_t b_at = address(kB == OperandRows::kept ? b + beside_row * b_pitch + beside_column
                                                        : b + below_row * b_pitch + below_column);
#pragma unroll 4
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t left[4];
    load_matrices<kA == OperandRows::contracted>(
        left, a_at + 2 * (kA == OperandRows::kept ? k : k * a_pitch));
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      uint32_t right[4];
      load_matrices<kB == OperandRows::contracted>(
          right,
          b_at + 2 * (kB == OperandRows::kept ? tile * 8 * b_pitch + k : k * b_pitch + tile * 8));
      multiply(d[tile], left, right[0], right[1]);
      multiply(d[tile + 1], left, right[2], right[3]);
    }
  }
}

/// f(row, column, x, y) for every two results side by side that this lane has.
template <int kTiles, class F>
__device__ __forceinline__ void each_pair(float (&d)[kTiles][4], F f) {
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    f(row, tile * 8 + column, d[tile][0], d[tile][1]);
    f(row + 8, tile * 8 + column, d[tile][2], d[tile][3]);
  }
}

}  // namespace moesh::kernels::cuda::mma
