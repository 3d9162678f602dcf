// Causal attention within a window of at most 128 positions, of heads of 64 features, forward and
// backward, with sinks. Warps multiply 16 x 8 x 16 (mma.sync); a block has 64 queries or 64 keys
// and all query heads of one key head, so that keys and values are read once for these. Every sum
// has one order. Tiles are 64 x 64 numbers in shared memory; the eights of a row are swapped by
// its number, so that no two rows of eight meet in a bank.
// S scores, P probabilities: P = exp(S - lse), dS = P (dP - D) with dP = dy v' and D = <dy, y>

#include <cuda_bf16.h>

#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/host.h"
#include "moesh/kernels/cuda/ptx.h"

namespace moesh::kernels::cuda {
namespace {

using ptx::bf16;

constexpr int kThreads = 128, kTile = 64, kWidth = 64;
constexpr int kTileBytes = kTile * kWidth * 2;
constexpr int kMostWindow = 128, kMostBlocks = 3;  // of keys that 64 queries see
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct WindowParams {
  const bf16 *q, *k, *v, *y, *dy;
  bf16 *out, *dq, *dk, *dv;  // without gaps, as y and dy
  int64_t q_strides[3], k_strides[3], v_strides[3];
  const float* sinks;  // null: none
  float *lse, *dots;   // [batch, heads, length]
  int length, num_heads, num_groups, window;
  float scale;
};

__device__ __forceinline__ uint32_t at(uint32_t tile, int row, int eight) {
  return tile + row * 128 + ((eight ^ (row & 7)) << 4);
}

__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy4(uint32_t to, const void* from, bool is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(is_there ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

/// Rows [first, first + 64) of a head; zeros behind its end.
__device__ __forceinline__ void load_tile(uint32_t tile, const bf16* head, int64_t stride,
                                          int first, int length) {
#pragma unroll
  for (int i = 0; i < kTile * 8 / kThreads; ++i) {
    const int piece = threadIdx.x + i * kThreads, row = piece / 8, eight = piece % 8;
    const bool is_there = first + row < length;
    copy16(at(tile, row, eight), head + (is_there ? first + row : 0) * stride + eight * 8,
           is_there);
  }
}

__device__ __forceinline__ void matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void turned_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A warp's 16 rows of a tile as the left side of products over the features.
using Left = uint32_t[4][4];

__device__ __forceinline__ void load_left(Left& left, uint32_t tile) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < 4; ++k) matrices(left[k], at(tile, row, 2 * k + lane / 16));
}

/// sum [16, 8 kEights] += left times rows [first, first + 8 kEights) of a tile.
template <int kEights>
__device__ __forceinline__ void add_scores(float (&sum)[kEights][4], const Left& left,
                                           uint32_t tile, int first) {
  const int lane = threadIdx.x % 32, row = first + lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int n = 0; n < kEights; n += 2)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t r[4];
      matrices(r, at(tile, row + n * 8, 2 * k + lane / 8 % 2));
      multiply(sum[n], left[k], r[0], r[1]), multiply(sum[n + 1], left[k], r[2], r[3]);
    }
}

/// sum [16, 64] += weights [16, 8 kEights] (rounded) times rows [first, first + 8 kEights).
template <int kEights>
__device__ __forceinline__ void add_weighted(float (&sum)[8][4], const float (&weights)[kEights][4],
                                             uint32_t tile, int first) {
  const int lane = threadIdx.x % 32, row = first + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
  for (int k = 0; k < kEights; k += 2) {
    const uint32_t left[4] = {ptx::pack(weights[k][0], weights[k][1]),
                              ptx::pack(weights[k][2], weights[k][3]),
                              ptx::pack(weights[k + 1][0], weights[k + 1][1]),
                              ptx::pack(weights[k + 1][2], weights[k + 1][3])};
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t r[4];
      turned_matrices(r, at(tile, row + k * 8, n + lane / 16));
      multiply(sum[n], left, r[0], r[1]), multiply(sum[n + 1], left, r[2], r[3]);
    }
  }
}

/// The rows of this warp, through its own rows of a tile that no other warp reads any more, to
/// positions from `first` on of a head of a tensor without gaps.
__device__ __forceinline__ void store_rows(uint32_t tile, const float (&sum)[8][4],
                                           const float (&factor)[2], bf16* head, int64_t stride,
                                           int first, int length) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t two =
          ptx::pack(sum[n][2 * half] * factor[half], sum[n][2 * half + 1] * factor[half]);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(at(tile, warp_row + lane / 4 + 8 * half, n) +
                                                   lane % 4 * 4),
                   "r"(two)
                   : "memory");
    }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = warp_row + i * 4 + lane / 8, eight = lane % 8;
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at(tile, row, eight))
                 : "memory");
    if (first + row < length)
      *reinterpret_cast<uint4*>(head + (first + row) * stride + eight * 8) = v;
  }
}

__device__ __forceinline__ bool is_visible(const WindowParams& p, int query, int key) {
  return key <= query && query - key < p.window;
}

// Where a block finds its heads: `head` in [batch, position, head, feature] without gaps, or
// with strides; and where the numbers of a head are in [batch, head, position].
struct BlockHeads {
  int batch, group, heads_of_group;
  __device__ BlockHeads(const WindowParams& p)
      : batch(blockIdx.z), group(blockIdx.y), heads_of_group(p.num_heads / p.num_groups) {}
  __device__ int head(int i) const { return group * heads_of_group + i; }
};
__device__ __forceinline__ int64_t plain(const WindowParams& p, int batch, int head,
                                         int num_heads) {
  return (static_cast<int64_t>(batch) * p.length * num_heads + head) * kWidth;
}
__device__ __forceinline__ int64_t strided(const int64_t (&s)[3], int batch, int head) {
  return batch * s[0] + head * s[2];
}
__device__ __forceinline__ int64_t row_of(const WindowParams& p, int batch, int head) {
  return (static_cast<int64_t>(batch) * p.num_heads + head) * p.length;
}

/// The first block of keys that the queries of a block see.
__device__ __forceinline__ int first_block_of(const WindowParams& p, int query_block) {
  const int first = query_block * kTile - p.window + 1;
  return first > 0 ? first / kTile : 0;
}

__device__ __forceinline__ void load_keys(const WindowParams& p, const BlockHeads& place,
                                          uint32_t keys, uint32_t values, int first_block,
                                          int num_blocks) {
  for (int b = 0; b < num_blocks; ++b) {
    const int first = (first_block + b) * kTile;
    load_tile(keys + b * kTileBytes, p.k + strided(p.k_strides, place.batch, place.group),
              p.k_strides[1], first, p.length);
    load_tile(values + b * kTileBytes, p.v + strided(p.v_strides, place.batch, place.group),
              p.v_strides[1], first, p.length);
  }
}

__global__ void __launch_bounds__(kThreads) window_kernel(const WindowParams p) {
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t keys = ptx::shared_address(memory), values = keys + kMostBlocks * kTileBytes,
                 queries = values + kMostBlocks * kTileBytes;
  const BlockHeads place(p);
  const int query_block = blockIdx.x, first_query = query_block * kTile;
  const int first_block = first_block_of(p, query_block),
            num_blocks = query_block - first_block + 1;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  const float factor = p.scale * kLog2e;
  const auto load_queries = [&](int i) {
    load_tile(queries + i % 2 * kTileBytes, p.q + strided(p.q_strides, place.batch, place.head(i)),
              p.q_strides[1], first_query, p.length);
    commit();
  };
  load_keys(p, place, keys, values, first_block, num_blocks);
  load_queries(0);
  for (int i = 0; i < place.heads_of_group; ++i) {
    const uint32_t tile = queries + i % 2 * kTileBytes;
    if (i + 1 < place.heads_of_group) {
      load_queries(i + 1);
      wait<1>();
    } else {
      wait<0>();
    }
    __syncthreads();
    Left left;
    load_left(left, tile);
    float sum[8][4] = {}, most[2] = {-INFINITY, -INFINITY}, total[2] = {};
    for (int b = 0; b < num_blocks; ++b) {
      const int first_key = (first_block + b) * kTile;
      float s[8][4] = {};
      add_scores(s, left, keys + b * kTileBytes, 0);
      float largest[2] = {most[0], most[1]};
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = first_key + n * 8 + lane % 4 * 2 + e % 2,
                    query = first_query + row + e / 2 * 8;
          s[n][e] = is_visible(p, query, key) ? s[n][e] * factor : -INFINITY;
          largest[e / 2] = fmaxf(largest[e / 2], s[n][e]);
        }
      float base[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
        largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
        base[half] = largest[half] == -INFINITY ? 0.f : largest[half];
        const float before = exp2f(most[half] - base[half]);
        most[half] = largest[half], total[half] *= before;
#pragma unroll
        for (int n = 0; n < 8; ++n) sum[n][2 * half] *= before, sum[n][2 * half + 1] *= before;
      }
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[n][e] = exp2f(s[n][e] - base[e / 2]);
          total[e / 2] += s[n][e];
        }
      add_weighted(sum, s, values + b * kTileBytes, 0);
    }
    const int head = place.head(i);
    float share[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half] += __shfl_xor_sync(~0u, total[half], 1);
      total[half] += __shfl_xor_sync(~0u, total[half], 2);
      const float sink = p.sinks ? p.sinks[head] * kLog2e : -INFINITY;
      const float base = fmaxf(most[half], sink), before = exp2f(most[half] - base);
      const float all = total[half] * before + exp2f(sink - base);
      share[half] = before / all;
      const int query = first_query + row + half * 8;
      if (lane % 4 == 0 && query < p.length)
        p.lse[row_of(p, place.batch, head) + query] = base * kLn2 + logf(all);
    }
    store_rows(tile, sum, share, p.out + plain(p, place.batch, head, p.num_heads),
               static_cast<int64_t>(p.num_heads) * kWidth, first_query, p.length);
    __syncthreads();  // the tile may be loaded anew
  }
}

/// dq, and D for the kernel after it.
__global__ void __launch_bounds__(kThreads, 2) window_dq_kernel(const WindowParams p) {
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t keys = ptx::shared_address(memory), values = keys + kMostBlocks * kTileBytes,
                 queries = values + kMostBlocks * kTileBytes, gradients = queries + 2 * kTileBytes;
  const BlockHeads place(p);
  const int query_block = blockIdx.x, first_query = query_block * kTile;
  const int first_block = first_block_of(p, query_block),
            num_blocks = query_block - first_block + 1;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16, row = warp_row + lane / 4;
  const int64_t stride = static_cast<int64_t>(p.num_heads) * kWidth;
  const float factor = p.scale * kLog2e;
  const auto load_queries = [&](int i) {
    const int head = place.head(i);
    load_tile(queries + i % 2 * kTileBytes, p.q + strided(p.q_strides, place.batch, head),
              p.q_strides[1], first_query, p.length);
    load_tile(gradients + i % 2 * kTileBytes, p.dy + plain(p, place.batch, head, p.num_heads),
              stride, first_query, p.length);
    commit();
  };
  load_keys(p, place, keys, values, first_block, num_blocks);
  load_queries(0);
  for (int i = 0; i < place.heads_of_group; ++i) {
    const uint32_t tile = queries + i % 2 * kTileBytes, gradient = gradients + i % 2 * kTileBytes;
    const int head = place.head(i);
    if (i + 1 < place.heads_of_group) {
      load_queries(i + 1);
      wait<1>();
    } else {
      wait<0>();
    }
    __syncthreads();
    // D: two lanes have a row, four eights each.
    float dot = 0.f;
    {
      const int mine = warp_row + lane / 2, query = first_query + mine;
      if (query < p.length) {
        const bf16* y =
            p.y + plain(p, place.batch, head, p.num_heads) + query * stride + lane % 2 * 32;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const uint4 a = *reinterpret_cast<const uint4*>(y + c * 8);
          uint32_t b[4];
          asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                       : "r"(at(gradient, mine, lane % 2 * 4 + c))
                       : "memory");
          const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
          for (int w = 0; w < 4; ++w)
            dot += ptx::low_half(words[w]) * ptx::low_half(b[w]) +
                   ptx::high_half(words[w]) * ptx::high_half(b[w]);
        }
      }
      dot += __shfl_xor_sync(~0u, dot, 1);
      if (lane % 2 == 0 && query < p.length) p.dots[row_of(p, place.batch, head) + query] = dot;
    }
    const float dots[2] = {__shfl_sync(~0u, dot, lane / 4 * 2),
                           __shfl_sync(~0u, dot, (lane / 4 + 8) * 2)};
    float lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + row + half * 8;
      lse[half] = query < p.length ? p.lse[row_of(p, place.batch, head) + query] * kLog2e : 0.f;
    }
    Left left, left_gradient;
    load_left(left, tile), load_left(left_gradient, gradient);
    float sum[8][4] = {};
    for (int b = 0; b < num_blocks; ++b) {
      const int first_key = (first_block + b) * kTile;
#pragma unroll
      for (int part = 0; part < kTile; part += 32) {
        float s[4][4] = {}, dp[4][4] = {};
        add_scores(s, left, keys + b * kTileBytes, part);
        add_scores(dp, left_gradient, values + b * kTileBytes, part);
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int key = first_key + part + n * 8 + lane % 4 * 2 + e % 2,
                      query = first_query + row + e / 2 * 8;
            const float probability = exp2f(s[n][e] * factor - lse[e / 2]);
            s[n][e] =
                is_visible(p, query, key) ? probability * (dp[n][e] - dots[e / 2]) * p.scale : 0.f;
          }
        add_weighted(sum, s, keys + b * kTileBytes, part);
      }
    }
    store_rows(tile, sum, {1.f, 1.f}, p.dq + plain(p, place.batch, head, p.num_heads), stride,
               first_query, p.length);
    __syncthreads();
  }
}

/// dk and dv of 64 keys: the query heads of their group one after the other, and the blocks of
/// queries that see them.
__global__ void __launch_bounds__(kThreads, 2) window_dkv_kernel(const WindowParams p) {
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t keys = ptx::shared_address(memory), values = keys + kTileBytes,
                 queries = values + kTileBytes, gradients = queries + 2 * kTileBytes,
                 numbers = gradients + 2 * kTileBytes;  // lse, then D, of each of the two
  const auto* held = reinterpret_cast<const float*>(memory + 6 * kTileBytes);
  const BlockHeads place(p);
  const int key_block = blockIdx.x, first_key = key_block * kTile;
  const int last_query = min(first_key + kTile - 1 + p.window - 1, p.length - 1);
  const int num_blocks = last_query / kTile - key_block + 1;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  const int64_t stride = static_cast<int64_t>(p.num_heads) * kWidth;
  const float factor = p.scale * kLog2e;
  const int num_parts = place.heads_of_group * num_blocks;
  const auto load = [&](int i) {
    const int head = place.head(i / num_blocks), first = (key_block + i % num_blocks) * kTile;
    const uint32_t which = i % 2;
    load_tile(queries + which * kTileBytes, p.q + strided(p.q_strides, place.batch, head),
              p.q_strides[1], first, p.length);
    load_tile(gradients + which * kTileBytes, p.dy + plain(p, place.batch, head, p.num_heads),
              stride, first, p.length);
    const int query = first + threadIdx.x % kTile;
    const bool is_there = query < p.length;
    const float* from = threadIdx.x < kTile ? p.lse : p.dots;
    copy4(numbers + (which * 2 * kTile + threadIdx.x) * 4,
          from + row_of(p, place.batch, head) + (is_there ? query : 0), is_there);
    commit();
  };
  load_keys(p, place, keys, values, key_block, 1);
  load(0);
  Left left_keys, left_values;
  float dk[8][4] = {}, dv[8][4] = {};
  for (int i = 0; i < num_parts; ++i) {
    if (i + 1 < num_parts) {
      load(i + 1);
      wait<1>();
    } else {
      wait<0>();
    }
    __syncthreads();
    if (i == 0) load_left(left_keys, keys), load_left(left_values, values);
    const uint32_t tile = queries + i % 2 * kTileBytes, gradient = gradients + i % 2 * kTileBytes;
    const float* lse = held + i % 2 * 2 * kTile;
    const float* dots = lse + kTile;
    const int first_query = (key_block + i % num_blocks) * kTile;
#pragma unroll
    for (int part = 0; part < kTile; part += 16) {
      float s[2][4] = {}, dp[2][4] = {};
      add_scores(s, left_keys, tile, part);
      add_scores(dp, left_values, gradient, part);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int in_tile = part + n * 8 + lane % 4 * 2 + e % 2;
          const int key = first_key + row + e / 2 * 8, query = first_query + in_tile;
          s[n][e] =
              is_visible(p, query, key) ? exp2f(s[n][e] * factor - lse[in_tile] * kLog2e) : 0.f;
          dp[n][e] = s[n][e] * (dp[n][e] - dots[in_tile]) * p.scale;
        }
      add_weighted(dv, s, gradient, part);
      add_weighted(dk, dp, tile, part);
    }
    __syncthreads();
  }
  const int64_t key_stride = static_cast<int64_t>(p.num_groups) * kWidth,
                here = plain(p, place.batch, place.group, p.num_groups);
  store_rows(keys, dk, {1.f, 1.f}, p.dk + here, key_stride, first_key, p.length);
  store_rows(values, dv, {1.f, 1.f}, p.dv + here, key_stride, first_key, p.length);
}

Error complaint(const WindowAttention& w) {
  if (w.window < 1 || w.window > kMostWindow || w.num_groups < 1 ||
      w.num_heads % w.num_groups != 0 || w.num_groups > 65535 || w.batch > 65535)
    return "attention within a window takes windows of 1 to 128 positions, and at most 65535 key "
           "heads and sequences";
  return nullptr;
}

WindowParams params_of(const WindowAttention& w) {
  const auto in = [](const HeadsAt& t) { return static_cast<const bf16*>(t.data); };
  WindowParams p = {};
  p.q = in(w.q), p.k = in(w.k), p.v = in(w.v);
  for (int i = 0; i < 3; ++i) {
    p.q_strides[i] = w.q.strides[i];
    p.k_strides[i] = w.k.strides[i];
    p.v_strides[i] = w.v.strides[i];
  }
  p.sinks = w.sinks;
  p.length = static_cast<int>(w.length), p.num_heads = static_cast<int>(w.num_heads);
  p.num_groups = static_cast<int>(w.num_groups), p.window = static_cast<int>(w.window);
  p.scale = w.scale;
  return p;
}

template <class Kernel>
Error launch(Kernel kernel, int bytes, const WindowAttention& w, const WindowParams& p,
             Stream stream) {
  if (Error error =
          text_of(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)))
    return error;
  const dim3 grid(static_cast<unsigned>((w.length + kTile - 1) / kTile),
                  static_cast<unsigned>(w.num_groups), static_cast<unsigned>(w.batch));
  kernel<<<grid, kThreads, bytes, static_cast<cudaStream_t>(stream)>>>(p);
  return text_of(cudaGetLastError());
}

}  // namespace

Error window_attention(const WindowAttention& w, void* y, float* lse, Stream stream) {
  if (Error error = complaint(w)) return error;
  if (w.length == 0 || w.batch == 0) return nullptr;
  WindowParams p = params_of(w);
  p.out = static_cast<bf16*>(y), p.lse = lse;
  return launch(window_kernel, (2 * kMostBlocks + 2) * kTileBytes, w, p, stream);
}

Error window_attention_backward(const WindowAttention& w, const void* y, const float* lse,
                                const void* dy, float* dots, void* dq, void* dk, void* dv,
                                Stream stream) {
  if (Error error = complaint(w)) return error;
  if (w.length == 0 || w.batch == 0) return nullptr;
  WindowParams p = params_of(w);
  p.y = static_cast<const bf16*>(y), p.dy = static_cast<const bf16*>(dy);
  p.lse = const_cast<float*>(lse), p.dots = dots;
  p.dq = static_cast<bf16*>(dq), p.dk = static_cast<bf16*>(dk), p.dv = static_cast<bf16*>(dv);
  if (Error error = launch(window_dq_kernel, (2 * kMostBlocks + 4) * kTileBytes, w, p, stream))
    return error;
  return launch(window_dkv_kernel, 6 * kTileBytes + 4 * kTile * 4, w, p, stream);
}

}  // namespace moesh::kernels::cuda
