#pragma once
// The Hopper instructions that C++ has no words for, one thin function each. Addresses in shared
// memory are 32-bit numbers.

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

namespace moesh::kernels::cuda::ptx {

using bf16 = __nv_bfloat16;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier: threads and bytes that arrive; waiting is by the parity of the phase ----

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
/// Its memory may be used for something else, or initialised once more.
__device__ __forceinline__ void barrier_invalidate(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/// Makes the barriers of this thread visible to the other block of the cluster and to TMA.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// One arrival, and a promise of bytes which TMA will bring.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
/// Arrives at the same barrier of block `rank` of the cluster. No .release.cluster: what is
/// released is a buffer that was only read, and the stronger form waits for this thread's stores to
/// global memory (it halved the speed of every kernel).
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// ---- other barriers and fences ----

/// Orders this thread's ordinary accesses of shared memory before those of TMA and wgmma.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void named_barrier(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- TMA: boxes of a tensor of three dimensions, coordinates from the innermost ----

__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, int x, int y, int z,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
/// The box lands at the same place in both blocks of the cluster, each on its own barrier.
__device__ __forceinline__ void tma_load_both(uint32_t to, const CUtensorMap* map, int x, int y,
                                              int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* map, int x, int y, int z,
                                          uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
      "r"(x), "r"(y), "r"(z), "r"(from)
      : "memory");
}
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// The stores of this thread have read their shared memory.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// ... and have written.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ---- shared memory by vectors and by 8x8 matrices ----

__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared16(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
/// Loads 16 bytes of global memory into registers that stay the same ones from one iteration of a
/// loop to the next. Left to itself the compiler loads into others and copies at once, and so
/// waits.
__device__ __forceinline__ void load_in_place(uint4& v, const void* from) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(from)
               : "memory");
}
/// 16 bytes from global to shared memory, without a register; in groups, which end in order.
__device__ __forceinline__ void copy_async16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// All but this thread's last kPending groups are there.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
/// Four 8x8 matrices, spread over a warp as wgmma spreads its accumulators; lane i gives the
/// address of row i % 8 of matrix i / 8.
template <bool kTransposed>
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  if constexpr (kTransposed) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
  }
}

// ---- numbers ----

/// Two floats as bf16, the first in the low half.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ float low_half(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_half(uint32_t packed) {
  return __uint_as_float(packed & 0xFFFF0000u);
}
/// To about 1e-7, with two instructions of the special function unit.
__device__ __forceinline__ float sigmoid(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return inverse;
}

// ---- wgmma: D[64, N] (+)= A[64, 16] B[N, 16]', both from shared memory ----

/// An operand in blocks of 64 columns, rows of 128 bytes, swizzled as TMA does it. Eight rows are
/// 1024 bytes; where the contraction runs along the rows ("mn-major"), blocks are 8192 bytes apart.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kBlock = 8192 >> 4, kEightRows = 1024 >> 4, kSwizzle128 = 1;
  return (address & 0x3FFFF) >> 4 | kBlock << 16 | kEightRows << 32 | kSwizzle128 << 62;
}
__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// All but the last kPending groups are done.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// After the wait: the compiler may not have read accumulators before it.
template <int kSize>
__device__ __forceinline__ void wgmma_end(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The operand list of up to 128 accumulators: %0 .. %127 by tens, and their constraints by eights.
#define MOESH_TEN(t) \
  "%" t "0,%" t "1,%" t "2,%" t "3,%" t "4,%" t "5,%" t "6,%" t "7,%" t "8,%" t "9,"
#define MOESH_EIGHT(i)                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define MOESH_THIRTY_TWO(i) \
  MOESH_EIGHT(i), MOESH_EIGHT(i + 8), MOESH_EIGHT(i + 16), MOESH_EIGHT(i + 24)

/// kMnA, kMnB: the contraction runs along the rows of that operand. N = 64 and 128 use the first
/// accumulators. accumulate = 0 overwrites.
template <int kN, bool kMnA, bool kMnB, int kSize>
__device__ __forceinline__ void wgmma(float (&d)[kSize], uint64_t a, uint64_t b, int accumulate) {
  static_assert((kN == 64 || kN == 128 || kN == 256) && kSize >= kN / 2);
  if constexpr (kN == 64) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MOESH_TEN("") MOESH_TEN("1")
            MOESH_TEN("2") "%30,%31}, %32, %33, add, 1, 1, %35, %36;\n}"
        : MOESH_THIRTY_TWO(0)
        : "l"(a), "l"(b), "r"(accumulate), "n"(kMnA), "n"(kMnB));
  } else if constexpr (kN == 128) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MOESH_TEN("") MOESH_TEN("1")
            MOESH_TEN("2") MOESH_TEN("3") MOESH_TEN("4") MOESH_TEN("5") "%60,%61,%62,%63}, "
        "%64, %65, add, 1, 1, %67, %68;\n}"
        : MOESH_THIRTY_TWO(0), MOESH_THIRTY_TWO(32)
        : "l"(a), "l"(b), "r"(accumulate), "n"(kMnA), "n"(kMnB));
  } else {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" MOESH_TEN("") MOESH_TEN(
            "1") MOESH_TEN("2") MOESH_TEN("3") MOESH_TEN("4") MOESH_TEN("5") MOESH_TEN("6")
            MOESH_TEN("7") MOESH_TEN("8") MOESH_TEN("9") MOESH_TEN("10") MOESH_TEN(
                "11") "%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, add, 1, 1, %131, %132;\n}"
        : MOESH_THIRTY_TWO(0), MOESH_THIRTY_TWO(32), MOESH_THIRTY_TWO(64), MOESH_THIRTY_TWO(96)
        : "l"(a), "l"(b), "r"(accumulate), "n"(kMnA), "n"(kMnB));
  }
}

/// The same of depth 32 in float8 (e4m3), N = 128.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MOESH_TEN("") MOESH_TEN("1")
          MOESH_TEN("2") MOESH_TEN("3") MOESH_TEN("4") MOESH_TEN("5") "%60,%61,%62,%63}, "
      "%64, %65, add, 1, 1;\n}"
      : MOESH_THIRTY_TWO(0), MOESH_THIRTY_TWO(32)
      : "l"(a), "l"(b), "r"(accumulate));
}

#undef MOESH_TEN
#undef MOESH_EIGHT
#undef MOESH_THIRTY_TWO

}  // namespace moesh::kernels::cuda::ptx
