// Rounding to float8. 16 lanes have a tile of a row, eight numbers each.
// T tokens, D model, F ffn, E experts, K top-k, R rows at their experts

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/float8.h"
#include "moesh/kernels/cuda/host.h"

namespace moesh::kernels::cuda {
namespace {

constexpr int kThreads = 256, kLanes = 16;

/// The bits of a magnitude: as numbers NaN and inf are the largest.
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

__device__ __forceinline__ uint32_t largest(const float (&v)[8]) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = max(most, magnitude(v[i]));
  return most;
}

__device__ __forceinline__ uint2 codes_of(const float (&v)[8], uint32_t scale) {
  const float inverse = __uint_as_float(float8_inverse(scale));
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pairs[i] = __nv_cvt_float2_to_fp8x2({v[2 * i] * inverse, v[2 * i + 1] * inverse},
                                        __NV_SATFINITE, __NV_E4M3);
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

/// A lane's eight numbers of a tile, with the scale of all. All lanes of a warp call it.
__device__ __forceinline__ uint2 round_tile(const float (&v)[8], float& scale) {
  uint32_t most = largest(v);
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2)
    most = max(most, __shfl_xor_sync(~0u, most, distance));
  const uint32_t bits = float8_scale(most);
  scale = __uint_as_float(bits);
  return codes_of(v, bits);
}

__device__ __forceinline__ void store8(void* codes, int64_t at, uint2 v) {
  *reinterpret_cast<uint2*>(static_cast<uint8_t*>(codes) + at) = v;
}

// ---- rows ----

struct ExpandParams {
  const bf16* x_TD;
  const int* inverse_TK;  // null: rows stay where they are
  bf16* rows_RD;          // null: only codes
  Float8Rows rows;
  int64_t num_tokens, pitch;
  int top_k, width;
  unsigned lanes_of_row;  // a multiple of 16
};

__global__ void __launch_bounds__(kThreads) expand8_kernel(const ExpandParams p) {
  // A division of 32 bits: one of 64 takes as long as the memory.
  const unsigned at = blockIdx.x * kThreads + threadIdx.x;
  const int64_t token = at / p.lanes_of_row;
  const int lane = static_cast<int>(at - token * p.lanes_of_row);
  const bool inside = token < p.num_tokens && lane * 8 < p.width;
  const uint4 value =
      inside ? __ldcs(reinterpret_cast<const uint4*>(p.x_TD + token * p.width + lane * 8))
             : uint4{};
  float v[8], scale;
  unpack(value, v);
  const uint2 codes = round_tile(v, scale);
  if (!inside) return;
#pragma unroll 8
  for (int k = 0; k < p.top_k; ++k) {
    const int64_t row = p.inverse_TK ? __ldg(p.inverse_TK + token * p.top_k + k) : token;
    if (row < 0) continue;
    store8(p.rows.codes, row * p.width + lane * 8, codes);
    if (lane % kLanes == 0) p.rows.scales[lane / kLanes * p.pitch + row] = scale;
    if (p.rows_RD) store16(p.rows_RD + row * p.width + lane * 8, value);
  }
}

// ---- rows on their way: codes, the exponent of each scale, zeros up to a word of 8 bytes ----

struct PackParams {
  const bf16* rows_RD;
  uint8_t* packed;
  int64_t num_rows;
  int width, num_tiles, bytes_of_row;  // whole tiles
};

__global__ void __launch_bounds__(kThreads) pack8_kernel(const PackParams p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = at / (p.width / 8);
  const int column = static_cast<int>(at - row * (p.width / 8)) * 8;
  const bool inside = row < p.num_rows;
  float v[8], scale;
  unpack(
      inside ? __ldcs(reinterpret_cast<const uint4*>(p.rows_RD + row * p.width + column)) : uint4{},
      v);
  const uint2 codes = round_tile(v, scale);
  if (!inside) return;
  const int64_t begin = row * p.bytes_of_row;
  store8(p.packed, begin + column, codes);
  if (column % kFloat8Tile == 0)
    p.packed[begin + p.width + column / kFloat8Tile] = __float_as_uint(scale) >> 23;
  if (column == 0)
    for (int i = p.width + p.num_tiles; i < p.bytes_of_row; ++i) p.packed[begin + i] = 0;
}

struct UnpackParams {
  const uint8_t* packed;
  bf16* rows_RD;
  int64_t num_rows;
  int width, bytes_of_row;
};

__global__ void __launch_bounds__(kThreads) unpack8_kernel(const UnpackParams p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = at / (p.width / 8);
  const int column = static_cast<int>(at - row * (p.width / 8)) * 8;
  if (row >= p.num_rows) return;
  const uint8_t* from = p.packed + row * p.bytes_of_row;
  const uint2 codes = __ldcs(reinterpret_cast<const uint2*>(from + column));
  const float scale =
      __uint_as_float(static_cast<uint32_t>(from[p.width + column / kFloat8Tile]) << 23);
  float v[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = i < 2 ? codes.x : codes.y;
    const float2 pair = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(
        static_cast<__nv_fp8x2_storage_t>(word >> (i % 2 * 16)), __NV_E4M3)));
    v[2 * i] = pair.x * scale, v[2 * i + 1] = pair.y * scale;
  }
  store16(p.rows_RD + row * p.width + column, packed(v));
}

// ---- weights ----

template <class T>
struct WeightParams {
  const T* w;
  uint8_t *codes, *transposed;  // null: not wanted
  float* scales;
  int height, width;
};

__device__ __forceinline__ uint4 load_bf16(const bf16* from) { return load16(from); }
__device__ __forceinline__ uint4 load_bf16(const float* from) {
  const float4 a = reinterpret_cast<const float4*>(from)[0],
               b = reinterpret_cast<const float4*>(from)[1];
  return {ptx::pack(a.x, a.y), ptx::pack(a.z, a.w), ptx::pack(b.x, b.y), ptx::pack(b.z, b.w)};
}

/// A block of threads for each block of 128 x 128; a thread has 8 x 8 of it.
template <class T>
__global__ void __launch_bounds__(kThreads) weight_kernel(const WeightParams<T> p) {
  constexpr int kPitch = kFloat8Tile + 16;
  __shared__ alignas(16) uint8_t turned[kFloat8Tile * kPitch];
  __shared__ uint32_t warps[kThreads / 32];
  const int column = threadIdx.x % 16 * 8, row = threadIdx.x / 16 * 8;
  const int first_column = blockIdx.x * kFloat8Tile, first_row = blockIdx.y * kFloat8Tile;
  const int64_t matrix = static_cast<int64_t>(blockIdx.z) * p.height * p.width;
  const bool has_column = first_column + column < p.width;
  uint4 values[8];
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t at =
        matrix + static_cast<int64_t>(first_row + row + i) * p.width + first_column + column;
    values[i] = has_column && first_row + row + i < p.height ? load_bf16(p.w + at) : uint4{};
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float v[8];
    unpack(values[i], v);
    most = max(most, largest(v));
  }
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) most = max(most, warps[i]);
  const uint32_t scale = float8_scale(most);
  if (threadIdx.x == 0)
    p.scales[(static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x] =
        __uint_as_float(scale);
  uint2 codes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float v[8];
    unpack(values[i], v);
    codes[i] = codes_of(v, scale);
    const int64_t at =
        matrix + static_cast<int64_t>(first_row + row + i) * p.width + first_column + column;
    if (p.codes && has_column && first_row + row + i < p.height) store8(p.codes, at, codes[i]);
  }
  if (!p.transposed) return;
  // Four columns of four rows at a time: bytes of four words to four other words.
#pragma unroll
  for (int right = 0; right < 2; ++right) {
    uint32_t lines[2][4];  // [upper and lower rows][column]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = right ? codes[4 * half + i].y : codes[4 * half + i].x;
      const uint32_t low01 = __byte_perm(word[0], word[1], 0x5140),
                     low23 = __byte_perm(word[2], word[3], 0x5140),
                     high01 = __byte_perm(word[0], word[1], 0x7362),
                     high23 = __byte_perm(word[2], word[3], 0x7362);
      lines[half][0] = __byte_perm(low01, low23, 0x5410);
      lines[half][1] = __byte_perm(low01, low23, 0x7632);
      lines[half][2] = __byte_perm(high01, high23, 0x5410);
      lines[half][3] = __byte_perm(high01, high23, 0x7632);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<uint2*>(turned + (column + 4 * right + i) * kPitch + row) = {lines[0][i],
                                                                                     lines[1][i]};
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kFloat8Tile * kFloat8Tile / 8 / kThreads; ++i) {
    const int piece = i * kThreads + threadIdx.x, line = piece / 16, place = piece % 16 * 8;
    if (first_column + line >= p.width || first_row + place >= p.height) continue;
    store8(p.transposed,
           matrix + static_cast<int64_t>(first_column + line) * p.height + first_row + place,
           *reinterpret_cast<const uint2*>(turned + line * kPitch + place));
  }
}

// ---- the hidden state: a warp for each row, 256 columns at a time ----

struct HiddenParams {
  Elementwise e;
  const int* ends_E;
  int num_experts, width;
  int64_t pitch;
  bf16* d_hidden_RF;     // act is written over it
  Float8Rows first, up;  // act; or d_gate and d_up
};

template <bool kBackward, bool kPlain>
__global__ void __launch_bounds__(kThreads) hidden_kernel(const __grid_constant__ HiddenParams p) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= p.ends_E[p.num_experts - 1]) return;
  const float score = p.e.score_R ? p.e.score_R[row] : 1.f;
  Slab slab{.width = p.width};
  if constexpr (!kPlain) {
    int low = -1, high = p.num_experts - 1;  // ends[low] <= row < ends[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (p.ends_E[middle] <= row ? low : high) = middle;
    }
    slab.expert = high;
  }
#pragma unroll 2
  for (int first = 0; first < p.width; first += 256) {
    const int column = first + lane * 8;
    const bool inside = column < p.width;
    const int64_t at = row * p.width + column;
    float gate[8], up[8], d[8], act[8], scale;
    unpack(inside ? load16(p.e.gate_RF + at) : uint4{}, gate);
    unpack(inside ? load16(p.e.up_RF + at) : uint4{}, up);
    if constexpr (kBackward) unpack(inside ? load16(p.d_hidden_RF + at) : uint4{}, d);
    ColumnBiases<kPlain> biases;
    biases.load(p.e, slab, min(column, p.width - 8));
    const RowActivation<kPlain> activation(p.e, biases, score);
    float dot = 0.f;
    with_activation<kPlain>(p.e, [&]<bool kClamped>() {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const ActivationResult v = activation.template at<kClamped>(i, gate[i], up[i]);
        act[i] = inside ? activation.after * v.h : 0.f;
        if constexpr (kBackward) {
          const float dh = activation.after * d[i], dg = dh * v.dh_dg, du = dh * v.dh_du;
          dot += p.e.before ? dg * gate[i] + du * up[i] : v.h * d[i];
          gate[i] = activation.before * dg, up[i] = activation.before * du;
        }
      }
    });
    if constexpr (kBackward) {
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2)
        dot += __shfl_xor_sync(~0u, dot, distance);
      if (p.e.d_score && lane == 0) p.e.d_score[first / 256 * p.e.num_rows + row] = dot;
      const uint4 d_gate = packed(gate), d_up = packed(up);
      unpack(d_gate, gate), unpack(d_up, up);  // rounded to bf16, then to float8
      if (inside) {
        store16(p.e.gate_RF + at, d_gate), store16(p.e.up_RF + at, d_up);
        store16(p.d_hidden_RF + at, packed(act));
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) gate[i] = up[i] = 0.f;
      }
      const uint2 of_gate = round_tile(gate, scale);
      if (inside && lane % kLanes == 0)
        p.first.scales[column / kFloat8Tile * p.pitch + row] = scale;
      const uint2 of_up = round_tile(up, scale);
      if (inside && lane % kLanes == 0) p.up.scales[column / kFloat8Tile * p.pitch + row] = scale;
      if (inside) store8(p.first.codes, at, of_gate), store8(p.up.codes, at, of_up);
    } else {
      unpack(packed(act), act);
      const uint2 codes = round_tile(act, scale);
      if (inside && lane % kLanes == 0)
        p.first.scales[column / kFloat8Tile * p.pitch + row] = scale;
      if (inside) store8(p.first.codes, at, codes);
    }
  }
}

template <bool kBackward>
Error run_hidden(const GroupedExperts& e, HiddenParams p, Stream stream) {
  if (e.ffn % 8 != 0 || e.ffn <= 0) return "ffn is to be a multiple of 8";
  if (e.num_rows == 0) return nullptr;
  const bool biased = e.b1_EF || e.b3_EF;
  if (kBackward && biased && e.score_before && e.score_R)
    return "biases after a score have no gradients in float8";
  p.e.score_R = e.score_R, p.e.before = e.score_before, p.e.clamped = e.clamped;
  p.e.bias[0] = static_cast<const bf16*>(e.b1_EF), p.e.bias[1] = static_cast<const bf16*>(e.b3_EF);
  p.e.num_rows = e.num_rows;
  p.ends_E = e.ends_E, p.num_experts = static_cast<int>(e.num_experts);
  p.width = static_cast<int>(e.ffn), p.pitch = scale_pitch(e.num_rows);
  const bool plain = !biased && !e.clamped && !(e.score_before && e.score_R);
  const auto kernel = plain ? hidden_kernel<kBackward, true> : hidden_kernel<kBackward, false>;
  return launch(stream, kernel, blocks_for(e.num_rows * 32, kThreads), kThreads, p);
}

}  // namespace

Error expand8(const void* x_TD, const std::int32_t* inverse_TK, void* rows_RD, Float8Rows rows,
              std::int64_t num_tokens, std::int64_t top_k, std::int64_t num_rows,
              std::int64_t width, Stream stream) {
  if (width % 8 != 0) return "the width of rows is to be a multiple of 8";
  const std::int64_t lanes = float8_tiles(width) * kLanes;
  const ExpandParams p{.x_TD = static_cast<const bf16*>(x_TD),
                       .inverse_TK = inverse_TK,
                       .rows_RD = static_cast<bf16*>(rows_RD),
                       .rows = rows,
                       .num_tokens = num_tokens,
                       .pitch = scale_pitch(num_rows),
                       .top_k = static_cast<int>(top_k),
                       .width = static_cast<int>(width),
                       .lanes_of_row = static_cast<unsigned>(lanes)};
  if (num_tokens * width == 0) return nullptr;
  if (num_tokens * lanes >> 31) return "tokens have fewer than 2^34 numbers in all";
  return launch(stream, expand8_kernel, blocks_for(num_tokens * lanes, kThreads), kThreads, p);
}

Error pack8(const void* rows_RD, void* packed, std::int64_t num_rows, std::int64_t width,
            Stream stream) {
  if (width % kFloat8Tile != 0) return "the width of rows that are packed is to be whole tiles";
  if (num_rows * width == 0) return nullptr;
  const PackParams p{.rows_RD = static_cast<const bf16*>(rows_RD),
                     .packed = static_cast<uint8_t*>(packed),
                     .num_rows = num_rows,
                     .width = static_cast<int>(width),
                     .num_tiles = static_cast<int>(width / kFloat8Tile),
                     .bytes_of_row = static_cast<int>(packed_row_bytes(width))};
  return launch(stream, pack8_kernel, blocks_for(num_rows * width / 8, kThreads), kThreads, p);
}

Error unpack8(const void* packed, void* rows_RD, std::int64_t num_rows, std::int64_t width,
              Stream stream) {
  if (width % kFloat8Tile != 0) return "the width of rows that were packed is to be whole tiles";
  if (num_rows * width == 0) return nullptr;
  const UnpackParams p{.packed = static_cast<const uint8_t*>(packed),
                       .rows_RD = static_cast<bf16*>(rows_RD),
                       .num_rows = num_rows,
                       .width = static_cast<int>(width),
                       .bytes_of_row = static_cast<int>(packed_row_bytes(width))};
  return launch(stream, unpack8_kernel, blocks_for(num_rows * width / 8, kThreads), kThreads, p);
}

Error float8_weight(const void* w, bool is_float32, void* codes, void* transposed, float* scales,
                    std::int64_t num_experts, std::int64_t height, std::int64_t width,
                    Stream stream) {
  if (height % 8 != 0 || width % 8 != 0) return "sizes of weights are to be multiples of 8";
  if (num_experts * height * width == 0) return nullptr;
  const dim3 grid(static_cast<unsigned>(float8_tiles(width)),
                  static_cast<unsigned>(float8_tiles(height)), static_cast<unsigned>(num_experts));
  const auto run = [&]<class T>(const T* numbers) {
    const WeightParams<T> p{
        numbers, static_cast<uint8_t*>(codes), static_cast<uint8_t*>(transposed),
        scales,  static_cast<int>(height),     static_cast<int>(width)};
    return launch(stream, weight_kernel<T>, grid, kThreads, p);
  };
  return is_float32 ? run(static_cast<const float*>(w)) : run(static_cast<const bf16*>(w));
}

Error act8(const GroupedExperts& e, const void* gate_RF, const void* up_RF, Float8Rows act,
           Stream stream) {
  HiddenParams p{};
  p.e.gate_RF = const_cast<bf16*>(static_cast<const bf16*>(gate_RF));
  p.e.up_RF = const_cast<bf16*>(static_cast<const bf16*>(up_RF));
  p.first = act;
  return run_hidden<false>(e, p, stream);
}

Error dh8(const GroupedExperts& e, void* d_hidden_RF, void* gate_RF, void* up_RF, Float8Rows d_gate,
          Float8Rows d_up, float* d_score_terms, Stream stream) {
  HiddenParams p{};
  p.e.gate_RF = static_cast<bf16*>(gate_RF), p.e.up_RF = static_cast<bf16*>(up_RF);
  p.e.d_score = d_score_terms;
  p.d_hidden_RF = static_cast<bf16*>(d_hidden_RF);
  p.first = d_gate, p.up = d_up;
  return run_hidden<true>(e, p, stream);
}

}  // namespace moesh::kernels::cuda
