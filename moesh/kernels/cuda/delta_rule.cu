// The gated delta rule in chunks of 64 tokens (kernels/attention.h and aten/delta_rule.cpp have
// the formulas), of heads of 128 features. Four kernels, in products of bf16 matrices summed in
// float32:
//
//   prepare   every chunk: queries and keys of length 1; P, and T = (1 + A)^-1 in float32
//   scan      chunk after chunk, for 64 features of values: R = beta (v - e k S), N = T R,
//             y = e q S + P N, S <- e_last S + k' (f N); in backward it keeps S and N in place of y
//   reverse   from the last chunk to the first: dN = P' dy + f k dS, dR = T' dN,
//             dS <- e_last dS + q' (e dy) - k' (beta e dR)
//   finish    every chunk: dP = dy N', dA = -dR N' (where there are P and A), then
//             dq = (dP M) k + e dy S',   d(beta k) = (dA M) k - e dR S',   dv = beta dR,
//             dk = (beta dA M)' k + (dP M)' q + f N dS' + beta d(beta k),
//             d(beta) = k d(beta k) + v dR,   d(c) = q dq + beta k d(beta k) - k (dk without its
//             last term), and that of c_last also f k (N dS') + e_last <S, dS>
//
// n chunks, C tokens of one, g key heads, h value heads, d features; M, c, e and f of a token as in
// aten/delta_rule.cpp. A token sees those of its chunk from `cut` to itself.

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/host.h"
#include "moesh/kernels/cuda/mma.h"

namespace moesh::kernels::cuda {
namespace {

using mma::each_pair;
using mma::OperandRows;
using mma::product;

constexpr int kThreads = 256;
constexpr int kC = 64, kD = 128;  // tokens of a chunk, features of a head
constexpr int kWide = kD + mma::kGap, kNarrow = kC + mma::kGap;  // pitches in shared memory

struct __align__(16) Token {
  float c, beta, e, f;
};

/// Where the parts of the workspace lie. Tokens are in chunks, the last one filled up.
struct Workspace {
  bf16 *q, *k;               // [B, g, nC, d], of length 1 (q: / sqrt(d))
  bf16 *p, *t;               // [B, h, n, C, C]
  bf16 *states, *d_states;   // [B, h, n, d, d]: before a chunk, and the gradient of that after it
  bf16 *n, *d_r;             // [B, h, nC, d]
  float *q_scale, *k_scale;  // [B, g, nC]: of what q and k were
  Token* tokens;             // [B, h, nC]
  int* cuts;                 // [B, nC]
};

struct DeltaRuleParams {
  DeltaRule rule;
  Workspace work;
  int num_chunks, group;  // group: value heads of a key head
  const bf16* qkv;
  bf16* y;
  const bf16* dy;
  bf16* d_qkv;
  float *d_decay, *d_beta;
  const float* first_state;
  float* last_state;

  __device__ int64_t chunk_of(int b, int head, int num_heads, int n) const {
    return (static_cast<int64_t>(b) * num_heads + head) * num_chunks + n;
  }
  __device__ int64_t value_chunk(int b, int h, int n) const {
    return chunk_of(b, h, static_cast<int>(rule.num_value_heads), n);
  }
  __device__ int64_t key_chunk(int b, int g, int n) const {
    return chunk_of(b, g, static_cast<int>(rule.num_key_heads), n);
  }
  /// The features of key head g of a token, as an offset.
  __device__ int64_t at(int b, int64_t token, int g) const {
    return b * rule.strides[0] + token * rule.strides[1] + g * rule.strides[2];
  }
  __device__ int64_t value_at(int b, int64_t token, int h) const {
    return at(b, token, h / group) + 2 * kD + h % group * kD;
  }
  /// The same in y, dy [B, L, h, d].
  __device__ int64_t out_at(int b, int64_t token, int h) const {
    return ((b * rule.length + token) * rule.num_value_heads + h) * kD;
  }
};

__device__ __forceinline__ void store_pair(bf16* to, float x, float y) {
  *reinterpret_cast<uint32_t*>(to) = ptx::pack(x, y);
}
__device__ __forceinline__ float2 load_pair(const bf16* from) {
  const uint32_t v = *reinterpret_cast<const uint32_t*>(from);
  return {ptx::low_half(v), ptx::high_half(v)};
}
/// Over the 16 lanes that have a row.
__device__ __forceinline__ float sum_of_16(float v) {
#pragma unroll
  for (int distance = 1; distance < 16; distance *= 2) v += __shfl_xor_sync(~0u, v, distance);
  return v;
}

/// [kRows, kColumns] without gaps from global to shared memory.
template <int kRows, int kColumns, int kBy = kThreads>
__device__ __forceinline__ void load_tile(bf16* to, int pitch, const bf16* from, int64_t stride) {
  constexpr int kPieces = kColumns / 8;
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kPieces; i += kBy)
    mma::load_async(to + i / kPieces * pitch + i % kPieces * 8,
                    from + i / kPieces * stride + i % kPieces * 8);
}
/// Tokens of a chunk; zeros past the end.
template <int kColumns, int kBy = kThreads, class At>
__device__ __forceinline__ void load_tokens(bf16* to, int pitch, const bf16* from, int num_tokens,
                                            At at) {
  constexpr int kPieces = kColumns / 8;
#pragma unroll
  for (int i = threadIdx.x; i < kC * kPieces; i += kBy) {
    const int row = i / kPieces, column = i % kPieces * 8;
    const bool exists = row < num_tokens;
    mma::load_async(to + row * pitch + column, from + at(exists ? row : 0) + column, exists);
  }
}
template <int kRows, int kColumns, int kBy = kThreads>
__device__ __forceinline__ void store_tile(bf16* to, int64_t stride, const bf16* from, int pitch) {
  constexpr int kPieces = kColumns / 8;
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kPieces; i += kBy)
    store16(to + i / kPieces * stride + i % kPieces * 8,
            load16(from + i / kPieces * pitch + i % kPieces * 8));
}

template <int kTiles>
__device__ __forceinline__ void clear(float (&d)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) d[i][j] = 0.f;
}

/// The tile of this warp in a result of 64 rows and kColumns columns.
template <int kColumns>
struct WarpTile {
  static constexpr int kTiles = kColumns / 16;
  int row = threadIdx.x / 32 % 4 * 16, column = threadIdx.x / 128 * (kColumns / 2);
};

// ---- prepare ----

constexpr int kPitchA = kC + 4;  // of float32 matrices
struct PrepareMemory {
  bf16 q[kC * kWide], k[kC * kWide];
  float a[kC * kPitchA], t[kC * kPitchA], product[kC / 2 * kPitchA];
  Token tokens[kC];
  int cuts[kC];
};

/// Queries or keys of a chunk, of length 1 times `scale`, into shared memory and the workspace.
__device__ __forceinline__ void unit_rows(const DeltaRuleParams& p, int b, int g, int n,
                                          int first_feature, float scale, bf16* shared, bf16* out,
                                          float* scales) {
  const int lane = threadIdx.x % 16;
  for (int row = threadIdx.x / 16; row < kC; row += kThreads / 16) {
    const int64_t token = static_cast<int64_t>(n) * kC + row;
    float v[8] = {};
    if (token < p.rule.length)
      unpack(load16(p.qkv + p.at(b, token, g) + first_feature + lane * 8), v);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += v[i] * v[i];
    const float inverse = scale * rsqrtf(sum_of_16(sum) + 1e-6f);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= inverse;
    const uint4 rounded = packed(v);
    const int64_t at = p.key_chunk(b, g, n) * kC + row;
    store16(shared + row * kWide + lane * 8, rounded);
    store16(out + at * kD + lane * 8, rounded);
    if (lane == 0) scales[at] = inverse;
  }
}

/// out = sign x y, of kSize rows and columns, by `kSize * kSize / kEach` threads.
template <int kSize, int kEach>
__device__ __forceinline__ void block_product(float* out, int out_pitch, float sign, const float* x,
                                              int x_pitch, const float* y, int y_pitch,
                                              int thread) {
  const int row = thread / (kSize / kEach), column = thread % (kSize / kEach) * kEach;
  float sum[kEach] = {};
#pragma unroll 8
  for (int k = 0; k < kSize; ++k)
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum[i] += x[row * x_pitch + k] * y[k * y_pitch + column + i];
#pragma unroll
  for (int i = 0; i < kEach; ++i) out[row * out_pitch + column + i] = sign * sum[i];
}

/// t = (1 + a)^-1, a strictly lower: blocks of 16 on the diagonal by substitution, then
/// [[T, 0], [-U a T, U]] of blocks twice and four times as large.
__device__ __forceinline__ void invert(PrepareMemory& m) {
  const int thread = threadIdx.x;
  for (int i = thread; i < kC * kC; i += kThreads)
    if (i / kC / 16 < i % kC / 16) m.t[i / kC * kPitchA + i % kC] = 0.f;
  if (thread < kC) {
    const int first = thread / 16 * 16, column = thread % 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float sum = i == column ? 1.f : 0.f;
#pragma unroll
      for (int k = 0; k < i; ++k) sum -= m.a[(first + i) * kPitchA + first + k] * x[k];
      x[i] = sum;
      m.t[(first + i) * kPitchA + first + column] = sum;
    }
  }
  __syncthreads();
  {
    const int base = thread / 128 * 32, below = base + 16;
    float* part = m.product + thread / 128 * 16;
    block_product<16, 2>(part, kPitchA, 1.f, m.a + below * kPitchA + base, kPitchA,
                         m.t + base * kPitchA + base, kPitchA, thread % 128);
    __syncthreads();
    block_product<16, 2>(m.t + below * kPitchA + base, kPitchA, -1.f, m.t + below * kPitchA + below,
                         kPitchA, part, kPitchA, thread % 128);
    __syncthreads();
  }
  block_product<32, 4>(m.product, kPitchA, 1.f, m.a + 32 * kPitchA, kPitchA, m.t, kPitchA, thread);
  __syncthreads();
  block_product<32, 4>(m.t + 32 * kPitchA, kPitchA, -1.f, m.t + 32 * kPitchA + 32, kPitchA,
                       m.product, kPitchA, thread);
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) prepare_kernel(const DeltaRuleParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  PrepareMemory& m = *reinterpret_cast<PrepareMemory*>(memory);
  const int n = blockIdx.x, g = blockIdx.y, b = blockIdx.z, thread = threadIdx.x;
  const int64_t first = static_cast<int64_t>(n) * kC;
  unit_rows(p, b, g, n, 0, rsqrtf(kD), m.q, p.work.q, p.work.q_scale);
  unit_rows(p, b, g, n, kD, 1.f, m.k, p.work.k, p.work.k_scale);
  bool is_new = false;  // the document of token `thread` begins in this chunk
  if (thread < kC) {
    const int64_t token = first + thread, real = token < p.rule.length ? token : p.rule.length - 1;
    const int64_t start = p.rule.starts ? p.rule.starts[b * p.rule.length + real] : 0;
    is_new = start >= first && p.rule.starts;
    m.cuts[thread] = start > first ? static_cast<int>(start - first) : 0;
    if (g == 0)
      p.work.cuts[(static_cast<int64_t>(b) * p.num_chunks + n) * kC + thread] = m.cuts[thread];
  }
  __syncthreads();
  // Warps 0 to 3: <k, k>; 4 to 7: <q, k>.
  const int row0 = thread / 32 % 4 * 16;
  const bool of_keys = thread < 128;
  float dots[8][4];
  clear(dots);
  product<OperandRows::kept, OperandRows::kept, kD>(dots, (of_keys ? m.k : m.q) + row0 * kWide,
                                                    kWide, m.k, kWide);
#pragma unroll 1
  for (int h = g * p.group; h < (g + 1) * p.group; ++h) {
    const int64_t chunk = p.value_chunk(b, h, n);
    if (thread < 32) {  // sums of the decays, two tokens a lane
      float2 decay = {0.f, 0.f};
      const int64_t token = first + 2 * thread;
      const float* decays = p.rule.decay + b * p.rule.length * p.rule.num_value_heads + h;
      if (token < p.rule.length) decay.x = decays[token * p.rule.num_value_heads];
      if (token + 1 < p.rule.length) decay.y = decays[(token + 1) * p.rule.num_value_heads];
      float sum = decay.x + decay.y;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const float before = __shfl_up_sync(~0u, sum, distance);
        if (thread >= distance) sum += before;
      }
      m.tokens[2 * thread].c = sum - decay.y, m.tokens[2 * thread + 1].c = sum;
    }
    __syncthreads();
    if (thread < kC) {
      Token token = m.tokens[thread];
      const int64_t at = first + thread;
      token.beta = at < p.rule.length
                       ? p.rule.beta[(b * p.rule.length + at) * p.rule.num_value_heads + h]
                       : 0.f;
      token.e = is_new ? 0.f : expf(token.c);
      token.f = thread < m.cuts[kC - 1] ? 0.f : expf(m.tokens[kC - 1].c - token.c);
      m.tokens[thread].beta = token.beta;
      p.work.tokens[chunk * kC + thread] = token;
    }
    __syncthreads();
    bf16* out = p.work.p + chunk * kC * kC;
    each_pair(dots, [&](int row, int column, float x, float y) {
      row += row0;
      const int last = of_keys ? row - 1 : row;
      const Token token = m.tokens[row];
      const auto seen = [&](int j, float dot) {
        return j > last || j < m.cuts[row] ? 0.f : expf(token.c - m.tokens[j].c) * dot;
      };
      x = seen(column, x), y = seen(column + 1, y);
      if (of_keys) {
        m.a[row * kPitchA + column] = token.beta * x;
        m.a[row * kPitchA + column + 1] = token.beta * y;
      } else {
        store_pair(out + row * kC + column, x, y);
      }
    });
    __syncthreads();
    invert(m);
    const int row = thread / 4, column = thread % 4 * 16;
#pragma unroll
    for (int i = 0; i < 16; i += 8) {
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = m.t[row * kPitchA + column + i + j];
      store16(p.work.t + chunk * kC * kC + row * kC + column + i, packed(v));
    }
    __syncthreads();
  }
}

// ---- scan ----

/// kV: the features of values that a block has.
template <int kV>
struct ScanMemory {
  static constexpr int kPitch = kV + mma::kGap;
  bf16 q[kC * kWide], k[kC * kWide];
  bf16 p[kC * kNarrow], t[kC * kNarrow];
  bf16 v[kC * kPitch], r[kC * kPitch], n[kC * kPitch], f_n[kC * kPitch];
  bf16 state[kD * kPitch];
  Token tokens[kC];
};

__device__ __forceinline__ void load_scalars(Token* to, const Token* from) {
  if (threadIdx.x < kC)
    mma::load_async(reinterpret_cast<bf16*>(to + threadIdx.x),
                    reinterpret_cast<const bf16*>(from + threadIdx.x));
}

/// kKeep: of backward.
template <bool kKeep, int kV>
__global__ void __launch_bounds__(kThreads, 2) scan_kernel(const DeltaRuleParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  using Memory = ScanMemory<kV>;
  Memory& m = *reinterpret_cast<Memory*>(memory);
  constexpr int kPitch = Memory::kPitch, kTiles = WarpTile<kV>::kTiles;
  const int first_v = blockIdx.x * kV, h = blockIdx.y, b = blockIdx.z, g = h / p.group;
  const int warp = threadIdx.x / 32;
  const WarpTile<kV> place;

  const auto load_first = [&](int n) {  // what is read first, and first no more
    const int64_t first = static_cast<int64_t>(n) * kC;
    const int num_tokens = static_cast<int>(min(p.rule.length - first, int64_t{kC}));
    load_tokens<kV>(m.v, kPitch, p.qkv + first_v, num_tokens,
                    [&](int row) { return p.value_at(b, first + row, h); });
    if constexpr (!kKeep)
      load_tile<kC, kD>(m.q, kWide, p.work.q + p.key_chunk(b, g, n) * kC * kD, kD);
  };
  const auto load_inverse = [&](int n) {
    load_tile<kC, kC>(m.t, kNarrow, p.work.t + p.value_chunk(b, h, n) * kC * kC, kC);
  };
  const auto load_last = [&](int n) {
    const int64_t chunk = p.value_chunk(b, h, n);
    load_tile<kC, kD>(m.k, kWide, p.work.k + p.key_chunk(b, g, n) * kC * kD, kD);
    if constexpr (!kKeep) load_tile<kC, kC>(m.p, kNarrow, p.work.p + chunk * kC * kC, kC);
    load_scalars(m.tokens, p.work.tokens + chunk * kC);
  };

  float state[kV / 8][4];  // rows 16 warp ..
  clear(state);
  const int64_t state_at = (static_cast<int64_t>(b) * p.rule.num_value_heads + h) * kD * kD;
  if (p.first_state)
    each_pair(state, [&](int row, int column, float& x, float& y) {
      const float* from = p.first_state + state_at + (warp * 16 + row) * kD + first_v + column;
      x = from[0], y = from[1];
    });
  const auto publish = [&] {
    each_pair(state, [&](int row, int column, float x, float y) {
      store_pair(m.state + (warp * 16 + row) * kPitch + column, x, y);
    });
  };
  publish();
  load_first(0), load_inverse(0), load_last(0), mma::load_commit();

#pragma unroll 1
  for (int n = 0; n < p.num_chunks; ++n) {
    const int64_t chunk = p.value_chunk(b, h, n), first = static_cast<int64_t>(n) * kC;
    const bool has_next = n + 1 < p.num_chunks;
    mma::loaded<0>();
    __syncthreads();
    if constexpr (kKeep)
      store_tile<kD, kV>(p.work.states + chunk * kD * kD + first_v, kD, m.state, kPitch);
    float of_k[kTiles][4], of_q[kTiles][4];
    clear(of_k), clear(of_q);
    product<OperandRows::kept, OperandRows::contracted, kD>(of_k, m.k + place.row * kWide, kWide,
                                                            m.state + place.column, kPitch);
    each_pair(of_k, [&](int row, int column, float x, float y) {
      row += place.row, column += place.column;
      const Token token = m.tokens[row];
      const float2 v = load_pair(m.v + row * kPitch + column);
      store_pair(m.r + row * kPitch + column, token.beta * (v.x - token.e * x),
                 token.beta * (v.y - token.e * y));
    });
    if constexpr (!kKeep)
      product<OperandRows::kept, OperandRows::contracted, kD>(of_q, m.q + place.row * kWide, kWide,
                                                              m.state + place.column, kPitch);
    __syncthreads();
    if (has_next) load_first(n + 1);
    clear(of_k);
    product<OperandRows::kept, OperandRows::contracted, kC>(of_k, m.t + place.row * kNarrow,
                                                            kNarrow, m.r + place.column, kPitch);
    each_pair(of_k, [&](int row, int column, float x, float y) {
      row += place.row, column += place.column;
      const float f = m.tokens[row].f;
      store_pair(m.n + row * kPitch + column, x, y);
      store_pair(m.f_n + row * kPitch + column, f * x, f * y);
    });
    __syncthreads();
    if (has_next) load_inverse(n + 1);
    const float last = m.tokens[kC - 1].e;
    each_pair(state, [&](int, int, float& x, float& y) { x *= last, y *= last; });
    product<OperandRows::contracted, OperandRows::contracted, kC>(state, m.k + warp * 16, kWide,
                                                                  m.f_n, kPitch);
    if constexpr (kKeep) {
      store_tile<kC, kV>(p.work.n + chunk * kC * kD + first_v, kD, m.n, kPitch);
    } else {
      each_pair(of_q, [&](int row, int, float& x, float& y) {
        const float e = m.tokens[place.row + row].e;
        x *= e, y *= e;
      });
      product<OperandRows::kept, OperandRows::contracted, kC>(of_q, m.p + place.row * kNarrow,
                                                              kNarrow, m.n + place.column, kPitch);
      each_pair(of_q, [&](int row, int column, float x, float y) {
        const int64_t token = first + place.row + row;
        if (token < p.rule.length)
          store_pair(p.y + p.out_at(b, token, h) + first_v + place.column + column, x, y);
      });
    }
    publish();
    __syncthreads();
    if (has_next) load_last(n + 1);
    mma::load_commit();
  }
  if (p.last_state)
    each_pair(state, [&](int row, int column, float x, float y) {
      *reinterpret_cast<float2*>(p.last_state + state_at + (warp * 16 + row) * kD + first_v +
                                 column) = {x, y};
    });
}

// ---- reverse ----

template <int kV>
struct ReverseMemory {
  static constexpr int kPitch = kV + mma::kGap;
  bf16 q[kC * kWide], k[kC * kWide];
  bf16 p[kC * kNarrow], t[kC * kNarrow];
  bf16 dy[kC * kPitch], d_n[kC * kPitch], e_dy[kC * kPitch];
  bf16 state[kD * kPitch];
  Token tokens[kC];
};

template <int kV>
__global__ void __launch_bounds__(kThreads, 2) reverse_kernel(const DeltaRuleParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  using Memory = ReverseMemory<kV>;
  Memory& m = *reinterpret_cast<Memory*>(memory);
  constexpr int kPitch = Memory::kPitch, kTiles = WarpTile<kV>::kTiles;
  bf16 *d_r = m.dy, *r_k = m.p;  // dR and -beta e dR, where these have been read
  const int first_v = blockIdx.x * kV, h = blockIdx.y, b = blockIdx.z, g = h / p.group;
  const int warp = threadIdx.x / 32;
  const WarpTile<kV> place;
  const auto load = [&](int n) {
    const int64_t first = static_cast<int64_t>(n) * kC, chunk = p.value_chunk(b, h, n);
    const int num_tokens = static_cast<int>(min(p.rule.length - first, int64_t{kC}));
    load_tokens<kV>(m.dy, kPitch, p.dy + first_v, num_tokens,
                    [&](int row) { return p.out_at(b, first + row, h); });
    load_tile<kC, kD>(m.k, kWide, p.work.k + p.key_chunk(b, g, n) * kC * kD, kD);
    load_tile<kC, kD>(m.q, kWide, p.work.q + p.key_chunk(b, g, n) * kC * kD, kD);
    load_tile<kC, kC>(m.p, kNarrow, p.work.p + chunk * kC * kC, kC);
    load_tile<kC, kC>(m.t, kNarrow, p.work.t + chunk * kC * kC, kC);
    load_scalars(m.tokens, p.work.tokens + chunk * kC);
    mma::load_commit();
  };
  float state[kV / 8][4];
  clear(state);
  load(p.num_chunks - 1);
#pragma unroll 1
  for (int n = p.num_chunks - 1; n >= 0; --n) {
    const int64_t chunk = p.value_chunk(b, h, n);
    each_pair(state, [&](int row, int column, float x, float y) {
      store_pair(m.state + (warp * 16 + row) * kPitch + column, x, y);
    });
    mma::loaded<0>();
    __syncthreads();
    store_tile<kD, kV>(p.work.d_states + chunk * kD * kD + first_v, kD, m.state, kPitch);
    float d[kTiles][4];
    clear(d);
    product<OperandRows::kept, OperandRows::contracted, kD>(d, m.k + place.row * kWide, kWide,
                                                            m.state + place.column, kPitch);
    each_pair(d, [&](int row, int column, float& x, float& y) {
      row += place.row, column += place.column;
      const Token token = m.tokens[row];
      x *= token.f, y *= token.f;
      const float2 dy = load_pair(m.dy + row * kPitch + column);
      store_pair(m.e_dy + row * kPitch + column, token.e * dy.x, token.e * dy.y);
    });
    product<OperandRows::contracted, OperandRows::contracted, kC>(d, m.p + place.row, kNarrow,
                                                                  m.dy + place.column, kPitch);
    each_pair(d, [&](int row, int column, float x, float y) {
      store_pair(m.d_n + (place.row + row) * kPitch + place.column + column, x, y);
    });
    __syncthreads();
    clear(d);
    product<OperandRows::contracted, OperandRows::contracted, kC>(d, m.t + place.row, kNarrow,
                                                                  m.d_n + place.column, kPitch);
    each_pair(d, [&](int row, int column, float x, float y) {
      row += place.row, column += place.column;
      const float factor = -m.tokens[row].beta * m.tokens[row].e;
      store_pair(d_r + row * kPitch + column, x, y);
      store_pair(r_k + row * kPitch + column, factor * x, factor * y);
    });
    __syncthreads();
    store_tile<kC, kV>(p.work.d_r + chunk * kC * kD + first_v, kD, d_r, kPitch);
    const float last = m.tokens[kC - 1].e;
    each_pair(state, [&](int, int, float& x, float& y) { x *= last, y *= last; });
    product<OperandRows::contracted, OperandRows::contracted, kC>(state, m.q + warp * 16, kWide,
                                                                  m.e_dy, kPitch);
    product<OperandRows::contracted, OperandRows::contracted, kC>(state, m.k + warp * 16, kWide,
                                                                  r_k, kPitch);
    __syncthreads();
    if (n > 0) load(n - 1);
  }
}

// ---- finish ----

constexpr int kFinishThreads = 512, kSides = kFinishThreads / 128;

struct FinishMemory {
  bf16 q[kC * kWide], k[kC * kWide];
  bf16 dy[kC * kWide], d_r[kC * kWide], n[kC * kWide];
  bf16 state[kD * kWide], d_state[kD * kWide];
  bf16 of_p[kC * kNarrow], of_a[kC * kNarrow], beta_of_a[kC * kNarrow];
  Token tokens[kC];
  int cuts[kC];
  float sums[2][kSides][kC];  // what d(c) and d(beta) are made of, by warps that have a row
  float of_last[kFinishThreads / 32], of_values[kC], d_c[kC];
};

/// The part of a warp in products of 64 rows and 128 columns: 16 rows and 32 columns.
struct WarpPart {
  int side = threadIdx.x / 128, row = threadIdx.x / 32 % 4 * 16, column = side * 32;
  int lane_row = row + threadIdx.x % 32 / 4, lane_column = column + threadIdx.x % 4 * 2;

  /// f(row, column, x, y, i) for every pair of this lane, where i is 0 or 1: its rows are two.
  template <class F>
  __device__ __forceinline__ void each(float (&d)[4][4], F f) const {
#pragma unroll
    for (int tile = 0; tile < 4; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        f(lane_row + 8 * i, lane_column + 8 * tile, d[tile][2 * i], d[tile][2 * i + 1], i);
  }
  /// Adds the products with `rows`, by row.
  __device__ __forceinline__ void dot(float (&d)[4][4], const bf16* rows, float (&sums)[2]) const {
    each(d, [&](int r, int c, float x, float y, int i) {
      const float2 v = load_pair(rows + r * kWide + c);
      sums[i] += v.x * x + v.y * y;
    });
  }
};

/// sum += factor(i) d, where the rows of this lane are two.
template <class Factor>
__device__ __forceinline__ void add(float (&sum)[4][4], const float (&d)[4][4], Factor factor) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float by = factor(i / 2);
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) sum[tile][i] += by * d[tile][i];
  }
}
/// Over the four lanes that have a row.
__device__ __forceinline__ void sum_of_4(float (&sums)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sums[i] += __shfl_xor_sync(~0u, sums[i], 1);
    sums[i] += __shfl_xor_sync(~0u, sums[i], 2);
  }
}

/// The sum of the warps that have a row.
__device__ __forceinline__ float over_sides(const float (&sums)[kSides][kC], int row) {
  float sum = 0.f;
#pragma unroll
  for (int side = 0; side < kSides; ++side) sum += sums[side][row];
  return sum;
}

/// From the gradient of a vector of some length to that of v, of which it is scale v:
/// scale (d - unit <unit, d> / length^2).
__device__ __forceinline__ void write_unit_gradient(const DeltaRuleParams& p, FinishMemory& m,
                                                    float (&d)[4][4], const bf16* unit,
                                                    float inverse_square, const float* scales,
                                                    int first_feature) {
  const int n = blockIdx.x, g = blockIdx.y, b = blockIdx.z;
  const WarpPart part;
  float along[2] = {};
  part.dot(d, unit, along);
  sum_of_4(along);
  __syncthreads();
  if (threadIdx.x % 4 == 0)
#pragma unroll
    for (int i = 0; i < 2; ++i) m.sums[0][part.side][part.lane_row + 8 * i] = along[i];
  __syncthreads();
  part.each(d, [&](int row, int column, float x, float y, int) {
    const int64_t token = static_cast<int64_t>(n) * kC + row;
    if (token >= p.rule.length) return;
    const float scale = scales[p.key_chunk(b, g, n) * kC + row],
                turn = over_sides(m.sums[0], row) * inverse_square;
    const float2 u = load_pair(unit + row * kWide + column);
    store_pair(p.d_qkv + p.at(b, token, g) + first_feature + column, scale * (x - u.x * turn),
               scale * (y - u.y * turn));
  });
}

__global__ void __launch_bounds__(kFinishThreads, 1) finish_kernel(const DeltaRuleParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  FinishMemory& m = *reinterpret_cast<FinishMemory*>(memory);
  const int n = blockIdx.x, g = blockIdx.y, b = blockIdx.z, thread = threadIdx.x;
  const int lane = thread % 32, warp = thread / 32;
  const int64_t first = static_cast<int64_t>(n) * kC;
  const int num_tokens = static_cast<int>(min(p.rule.length - first, int64_t{kC}));
  const int64_t key_chunk = p.key_chunk(b, g, n);
  const WarpPart part;
  const int square_row = part.row, square_column = part.side * 16;  // in products of 64 columns
  load_tile<kC, kD, kFinishThreads>(m.q, kWide, p.work.q + key_chunk * kC * kD, kD);
  load_tile<kC, kD, kFinishThreads>(m.k, kWide, p.work.k + key_chunk * kC * kD, kD);
  if (thread < kC)
    m.cuts[thread] = p.work.cuts[(static_cast<int64_t>(b) * p.num_chunks + n) * kC + thread];
  float dq[4][4] = {}, dk[4][4] = {};
#pragma unroll 1
  for (int h = g * p.group; h < (g + 1) * p.group; ++h) {
    const int64_t chunk = p.value_chunk(b, h, n);
    load_tokens<kD, kFinishThreads>(m.dy, kWide, p.dy, num_tokens,
                                    [&](int row) { return p.out_at(b, first + row, h); });
    load_tile<kC, kD, kFinishThreads>(m.d_r, kWide, p.work.d_r + chunk * kC * kD, kD);
    load_tile<kC, kD, kFinishThreads>(m.n, kWide, p.work.n + chunk * kC * kD, kD);
    load_scalars(m.tokens, p.work.tokens + chunk * kC);
    mma::load_commit();
    load_tile<kD, kD, kFinishThreads>(m.state, kWide, p.work.states + chunk * kD * kD, kD);
    mma::load_commit();
    load_tile<kD, kD, kFinishThreads>(m.d_state, kWide, p.work.d_states + chunk * kD * kD, kD);
    mma::load_commit();
    mma::loaded<2>();
    __syncthreads();
    {
      float of_p[2][4], of_a[2][4];
      clear(of_p), clear(of_a);
      product<OperandRows::kept, OperandRows::kept, kD>(of_p, m.dy + square_row * kWide, kWide,
                                                        m.n + square_column * kWide, kWide);
      product<OperandRows::kept, OperandRows::kept, kD>(of_a, m.d_r + square_row * kWide, kWide,
                                                        m.n + square_column * kWide, kWide);
      const auto factor = [&](int i, int j) {
        return j > i || j < m.cuts[i] ? 0.f : expf(m.tokens[i].c - m.tokens[j].c);
      };
      each_pair(of_p, [&](int row, int column, float& x, float& y) {
        row += square_row, column += square_column;
        store_pair(m.of_p + row * kNarrow + column, x * factor(row, column),
                   y * factor(row, column + 1));
      });
      each_pair(of_a, [&](int row, int column, float x, float y) {
        row += square_row, column += square_column;
        x = row == column ? 0.f : -x * factor(row, column);
        y = row == column + 1 ? 0.f : -y * factor(row, column + 1);
        const float beta = m.tokens[row].beta;
        store_pair(m.of_a + row * kNarrow + column, x, y);
        store_pair(m.beta_of_a + row * kNarrow + column, beta * x, beta * y);
      });
    }
    // dv, and <v, dR> of each token.
    for (int row = thread / 16; row < kC; row += kFinishThreads / 16) {
      const int feature = thread % 16 * 8;
      const bool exists = row < num_tokens;
      const int64_t at = exists ? p.value_at(b, first + row, h) + feature : 0;
      float v[8] = {}, d_r[8];
      if (exists) unpack(load16(p.qkv + at), v);
      unpack(load16(m.d_r + row * kWide + feature), d_r);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += v[i] * d_r[i], d_r[i] *= m.tokens[row].beta;
      sum = sum_of_16(sum);
      if (exists) store16(p.d_qkv + at, packed(d_r));
      if (thread % 16 == 0) m.of_values[row] = sum;
    }
    mma::loaded<1>();
    __syncthreads();

    // For the two rows of this lane: <q, dq>, <k, d(beta k)>, <k, dk but for that>, <k, f N dS'>.
    float of_q[2] = {}, of_beta[2] = {}, of_k[2] = {}, of_f[2] = {};
    float d[4][4], of_state[4][4];
    clear(d), clear(of_state);
    product<OperandRows::kept, OperandRows::contracted, kC>(d, m.of_p + part.row * kNarrow, kNarrow,
                                                            m.k + part.column, kWide);
    product<OperandRows::kept, OperandRows::kept, kD>(of_state, m.dy + part.row * kWide, kWide,
                                                      m.state + part.column * kWide, kWide);
    add(d, of_state, [&](int i) { return m.tokens[part.lane_row + 8 * i].e; });
    part.dot(d, m.q, of_q);
    add(dq, d, [](int) { return 1.f; });

    clear(d), clear(of_state);  // d(beta k)
    product<OperandRows::kept, OperandRows::contracted, kC>(d, m.of_a + part.row * kNarrow, kNarrow,
                                                            m.k + part.column, kWide);
    product<OperandRows::kept, OperandRows::kept, kD>(of_state, m.d_r + part.row * kWide, kWide,
                                                      m.state + part.column * kWide, kWide);
    add(d, of_state, [&](int i) { return -m.tokens[part.lane_row + 8 * i].e; });
    part.dot(d, m.k, of_beta);
    add(dk, d, [&](int i) { return m.tokens[part.lane_row + 8 * i].beta; });

    clear(d), clear(of_state);
    product<OperandRows::contracted, OperandRows::contracted, kC>(
        d, m.beta_of_a + part.row, kNarrow, m.k + part.column, kWide);
    product<OperandRows::contracted, OperandRows::contracted, kC>(d, m.of_p + part.row, kNarrow,
                                                                  m.q + part.column, kWide);
    mma::loaded<0>();
    __syncthreads();
    product<OperandRows::kept, OperandRows::kept, kD>(of_state, m.n + part.row * kWide, kWide,
                                                      m.d_state + part.column * kWide, kWide);
    part.dot(of_state, m.k, of_f);
    const auto f = [&](int i) { return m.tokens[part.lane_row + 8 * i].f; };
    add(d, of_state, f);
    part.dot(d, m.k, of_k);
    add(dk, d, [](int) { return 1.f; });
    sum_of_4(of_q), sum_of_4(of_beta), sum_of_4(of_k), sum_of_4(of_f);
    // For c_last: the rows of this warp, and a share of <S, dS>.
    float of_last = lane % 4 == 0 ? f(0) * of_f[0] + f(1) * of_f[1] : 0.f;
    {
      float sum = 0.f;
      for (int i = thread; i < kD * kD / 8; i += kFinishThreads) {
        float x[8], y[8];
        unpack(load16(m.state + i / 16 * kWide + i % 16 * 8), x);
        unpack(load16(m.d_state + i / 16 * kWide + i % 16 * 8), y);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += x[j] * y[j];
      }
      of_last += m.tokens[kC - 1].e * sum;
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
      of_last += __shfl_xor_sync(~0u, of_last, distance);
    if (lane == 0) m.of_last[warp] = of_last;
    if (lane % 4 == 0)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = part.lane_row + 8 * i;
        m.sums[0][part.side][row] = of_q[i] + m.tokens[row].beta * of_beta[i] - of_k[i];
        m.sums[1][part.side][row] = of_beta[i];
      }
    __syncthreads();
    if (thread < kC) {
      float d_c = over_sides(m.sums[0], thread);
      if (thread == kC - 1)
#pragma unroll
        for (int i = 0; i < kFinishThreads / 32; ++i) d_c += m.of_last[i];
      m.d_c[thread] = d_c;
      if (thread < num_tokens)
        p.d_beta[(b * p.rule.length + first + thread) * p.rule.num_value_heads + h] =
            over_sides(m.sums[1], thread) + m.of_values[thread];
    }
    __syncthreads();
    if (thread < 32) {  // c_i has the decays up to that of i
      const float low = m.d_c[2 * thread], high = m.d_c[2 * thread + 1];
      float sum = low + high;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const float after = __shfl_down_sync(~0u, sum, distance);
        if (thread + distance < 32) sum += after;
      }
      float* out = p.d_decay + (b * p.rule.length + first) * p.rule.num_value_heads + h;
      if (2 * thread < num_tokens) out[2 * thread * p.rule.num_value_heads] = sum;
      if (2 * thread + 1 < num_tokens) out[(2 * thread + 1) * p.rule.num_value_heads] = sum - low;
    }
    __syncthreads();
  }
  write_unit_gradient(p, m, dq, m.q, kD, p.work.q_scale, 0);
  write_unit_gradient(p, m, dk, m.k, 1.f, p.work.k_scale, kD);
}

// ---- host ----

Workspace laid_out(const DeltaRule& r, bool backward, void* base) {
  Workspace w = {};
  const std::int64_t chunks = r.batch * ((r.length + kC - 1) / kC),
                     of_keys = chunks * r.num_key_heads, of_values = chunks * r.num_value_heads;
  auto* next = static_cast<std::uint8_t*>(base);
  const auto part = [&](auto*& pointer, std::int64_t count) {  // multiples of 256 bytes
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(next);
    next += count * static_cast<std::int64_t>(sizeof *pointer);
  };
  part(w.q, of_keys * kC * kD), part(w.k, of_keys * kC * kD);
  part(w.q_scale, of_keys * kC), part(w.k_scale, of_keys * kC);
  part(w.p, of_values * kC * kC), part(w.t, of_values * kC * kC);
  part(w.tokens, of_values * kC), part(w.cuts, chunks * kC);
  if (backward) {
    part(w.states, of_values * kD * kD), part(w.d_states, of_values * kD * kD);
    part(w.n, of_values * kC * kD), part(w.d_r, of_values * kC * kD);
  }
  return w;
}

DeltaRuleParams params_of(const DeltaRule& r, bool backward, const void* qkv, void* workspace) {
  DeltaRuleParams p = {};
  p.rule = r, p.work = laid_out(r, backward, workspace);
  p.num_chunks = static_cast<int>((r.length + kC - 1) / kC);
  p.group = static_cast<int>(r.num_value_heads / r.num_key_heads);
  p.qkv = static_cast<const bf16*>(qkv);
  return p;
}

template <class Kernel>
Error launch(Prepared& prepared, Kernel kernel, dim3 grid, std::size_t bytes,
             const DeltaRuleParams& p, Stream stream, int threads = kThreads) {
  int num_blocks = 0;
  if (Error error = prepared(kernel, threads, static_cast<int>(bytes), 1, num_blocks)) return error;
  kernel<<<grid, threads, bytes, static_cast<cudaStream_t>(stream)>>>(p);
  return text_of(cudaGetLastError());
}

dim3 by_chunk(const DeltaRuleParams& p) {
  return {static_cast<unsigned>(p.num_chunks), static_cast<unsigned>(p.rule.num_key_heads),
          static_cast<unsigned>(p.rule.batch)};
}
dim3 by_head(const DeltaRuleParams& p, int v) {
  return {static_cast<unsigned>(kD / v), static_cast<unsigned>(p.rule.num_value_heads),
          static_cast<unsigned>(p.rule.batch)};
}

/// f(how many features of values a block of scan and reverse has): few where there are few heads,
/// so that there are blocks for a whole device.
template <class F>
Error with_features(const DeltaRule& r, F f) {
  constexpr int kFewHeads = 100;
  if (r.batch * r.num_value_heads < kFewHeads) return f(std::integral_constant<int, 32>());
  return f(std::integral_constant<int, 64>());
}

template <bool kKeep>
Error prepare_and_scan(const DeltaRuleParams& p, Stream stream) {
  static Prepared prepare;
  if (Error error = launch(prepare, prepare_kernel, by_chunk(p), sizeof(PrepareMemory), p, stream))
    return error;
  return with_features(p.rule, [&](auto v) {
    static Prepared scan;
    return launch(scan, scan_kernel<kKeep, v>, by_head(p, v), sizeof(ScanMemory<v>), p, stream);
  });
}

}  // namespace

Error delta_rule(const DeltaRule& r, const void* qkv, const float* first_state, void* workspace,
                 void* y, float* last_state, Stream stream) {
  DeltaRuleParams p = params_of(r, false, qkv, workspace);
  p.y = static_cast<bf16*>(y), p.first_state = first_state, p.last_state = last_state;
  return prepare_and_scan<false>(p, stream);
}

Error delta_rule_backward(const DeltaRule& r, const void* qkv, const void* dy, void* workspace,
                          void* d_qkv, float* d_decay, float* d_beta, Stream stream) {
  static Prepared finish;
  DeltaRuleParams p = params_of(r, true, qkv, workspace);
  p.dy = static_cast<const bf16*>(dy), p.d_qkv = static_cast<bf16*>(d_qkv);
  p.d_decay = d_decay, p.d_beta = d_beta;
  if (Error error = prepare_and_scan<true>(p, stream)) return error;
  if (Error error = with_features(r, [&](auto v) {
        static Prepared reverse;
        return launch(reverse, reverse_kernel<v>, by_head(p, v), sizeof(ReverseMemory<v>), p,
                      stream);
      }))
    return error;
  return launch(finish, finish_kernel, by_chunk(p), sizeof(FinishMemory), p, stream,
                kFinishThreads);
}

}  // namespace moesh::kernels::cuda
