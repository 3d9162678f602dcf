// Included once by each simd_*.cpp, which defines MOESH_SIMD (a name for the instruction set) and is compiled with its flags.
// Everything here has internal linkage: a function that the linker could share between two instruction sets would crash
// older processors. For the same reason nothing is included that has inline functions of its own.

#include "moesh/kernels/cpu/simd.h"

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define MOESH_AVX512 1
#endif

namespace moesh::kernels::cpu {
namespace {

using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uintptr_t;

// ---- vectors ----

#if defined(MOESH_AVX512)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));

// float64 is for proofs: one lane.
template <class A>
struct LanesOf {
  using Vector = Floats;
  static constexpr int64_t kCount = kLanes;
};
template <>
struct LanesOf<double> {
  using Vector = double;
  static constexpr int64_t kCount = 1;
};

template <class V, class U>
inline V load_bytes(const U* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

inline double load(const double* x) { return *x; }
inline Floats load(const float* x) { return load_bytes<Floats>(x); }
inline Words widen(Halves x) {
#if defined(MOESH_AVX512)  // GCC 12 takes five instructions for __builtin_convertvector
  return __builtin_bit_cast(Words, _mm512_cvtepu16_epi32(__builtin_bit_cast(__m256i, x)));
#else
  return __builtin_convertvector(x, Words);
#endif
}
inline Floats load(const Bf16* x) { return __builtin_bit_cast(Floats, widen(load_bytes<Halves>(x)) << 16); }

inline void put(double* out, double x) { *out = x; }
inline void put(float* out, Floats x) { __builtin_memcpy(out, &x, sizeof(x)); }
inline void put(Bf16* out, Floats x) {  // round to nearest even; a NaN stays one
#if defined(MOESH_AVX512) && defined(__AVX512BF16__)
  const __m256bh halves = _mm512_cvtneps_pbh(__builtin_bit_cast(__m512, x));
  __builtin_memcpy(out, &halves, sizeof(halves));
#else
  const Words bits = __builtin_bit_cast(Words, x);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Halves halves = __builtin_convertvector(x != x ? Words{} + 0x7fc0u : rounded, Halves);
  __builtin_memcpy(out, &halves, sizeof(halves));
#endif
}

inline double reciprocal(double x) { return 1 / x; }
inline Floats reciprocal(Floats x) {
#if defined(MOESH_AVX512)  // 14 bits and a Newton step, where a division takes as long as a whole exponential
  const Floats r = __builtin_bit_cast(Floats, _mm512_rcp14_ps(__builtin_bit_cast(__m512, x)));
  return r * (2.0f - x * r);
#else
  return 1.0f / x;
#endif
}

template <class V>
inline V splat(double x) {
  if constexpr (sizeof(V) == sizeof(double)) return x;
  else return V{} + static_cast<float>(x);
}

inline double sum_of(double x) { return x; }
inline float sum_of(Floats x) {
#if defined(MOESH_AVX512)
  return _mm512_reduce_add_ps(__builtin_bit_cast(__m512, x));
#else
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
#endif
}

/// Calls f(j, n) for whole vectors of [0, columns), then once for the rest, n < kCount.
template <class A, class F>
inline __attribute__((always_inline)) void for_lanes(int64_t columns, const F& f) {
  constexpr int64_t n = LanesOf<A>::kCount;
  int64_t j = 0;
  for (; j + n <= columns; j += n) f(j, n);
  if (j < columns) f(j, columns - j);
}

/// n of the lanes from memory, zeros in the others. (No call to memcpy here: it would spill every vector around it.)
template <class T>
inline __attribute__((always_inline)) auto load(const T* from, int64_t n) {
  constexpr int64_t count = LanesOf<Accumulate<T>>::kCount;
  if (n == count) return load(from);
  T part[count] = {};
  for (int64_t i = 0; i < n; ++i) part[i] = from[i];
  return load(part);
}
template <class T, class V>
inline __attribute__((always_inline)) void put(T* to, V x, int64_t n) {
  constexpr int64_t count = LanesOf<Accumulate<T>>::kCount;
  if (n == count) return put(to, x);
  T part[count];
  put(part, x);
  for (int64_t i = 0; i < n; ++i) to[i] = part[i];
}

// ---- packing ----

// Weights are read once, in strips which the processor's own prefetcher follows badly, and rows of tokens are at random places:
// ask for a row this many rows ahead, and after the last one for the strip that comes next.
constexpr int64_t kRowsAhead = 32;

constexpr int64_t kSavedAhead = 8;  // saved rows come back from memory, with more work on each
constexpr int64_t kSumsAhead = 8;   // and sums of tokens from a cache

template <class T>
inline void prefetch_bytes(const T* from, int64_t n) {
  const auto* bytes = reinterpret_cast<const char*>(from);
  for (int64_t i = 0; i < n * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(bytes + i);
}

template <class T>
inline void prefetch_row(RowView<T> x, int64_t r, int64_t rows, const T* next, int64_t n) {
  if (r < rows) prefetch_bytes(x.row(r), n);
  else if (next) prefetch_bytes(next + (r - rows) * x.stride, n);
}

template <class U>
inline void transpose_tail(RowView<U> x, int64_t r0, int64_t r1, int64_t c0, int64_t c1, U* out, int64_t ld) {
  for (int64_t r = r0; r < r1; ++r) {
    const U* row = x.row(r);
    for (int64_t c = c0; c < c1; ++c) out[c * ld + r] = row[c];
  }
}

#if defined(MOESH_AVX512)
constexpr int64_t kBlock = 16;

// 16 rows of 16 words become 16 columns: four rounds that exchange ever larger blocks, each in place so that all stays in registers.
// Column c of the result ends up in r[kPlace[c]].
constexpr int kPlace[kBlock] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
inline __attribute__((always_inline)) void transpose_16x16(__m512i* r) {
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    const __m512i a = r[i], b = r[i + 1];
    r[i] = _mm512_unpacklo_epi32(a, b), r[i + 1] = _mm512_unpackhi_epi32(a, b);
  }
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const int i = j / 2 * 4 + j % 2;
    const __m512i a = r[i], b = r[i + 2];
    r[i] = _mm512_unpacklo_epi64(a, b), r[i + 2] = _mm512_unpackhi_epi64(a, b);
  }
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const int i = j / 4 * 8 + j % 4;
    const __m512i a = r[i], b = r[i + 4];
    r[i] = _mm512_shuffle_i32x4(a, b, 0x88), r[i + 4] = _mm512_shuffle_i32x4(a, b, 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512i a = r[i], b = r[i + 8];
    r[i] = _mm512_shuffle_i32x4(a, b, 0x88), r[i + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
  }
}

// A strip of 16 words of width: transposed to out, whose stride is ld words. row(i) gives its rows, ahead(i) what to fetch ahead.
template <class Row, class Ahead>
inline __attribute__((always_inline)) void transpose_strip(int64_t columns, uint32_t* out, int64_t ld, const Row& row, const Ahead& ahead) {
  for (int64_t c = 0; c + kBlock <= columns; c += kBlock) {
    __m512i v[kBlock];
#pragma GCC unroll 16
    for (int i = 0; i < kBlock; ++i) v[i] = row(i, c);
#pragma GCC unroll 16
    for (int i = 0; i < kBlock; ++i) __builtin_prefetch(ahead(i) + c);
    transpose_16x16(v);
#pragma GCC unroll 16
    for (int i = 0; i < kBlock; ++i) _mm512_storeu_si512(out + (c + i) * ld, v[kPlace[i]]);
  }
}

void transpose_words(RowView<uint32_t> x, const uint32_t* next, int64_t rows, int64_t columns, uint32_t* out, int64_t ld) {
  const int64_t full_r = rows / kBlock * kBlock, full_c = columns / kBlock * kBlock;
  for (int64_t r = 0; r < full_r; r += kBlock) {
    if (!x.index) {
      const int64_t stride = x.stride;
      const uint32_t* base = x.row(r);
      const uint32_t* then = r + kBlock < full_r ? base + kBlock * stride : next ? next : base;
      transpose_strip(
          columns, out + r, ld, [=](int i, int64_t c) { return _mm512_loadu_si512(base + i * stride + c); },
          [=](int i) { return then + i * stride; });
    } else {
      const uint32_t *from[kBlock], *then[kBlock];
      for (int i = 0; i < kBlock; ++i) from[i] = x.row(r + i), then[i] = r + kBlock + i < rows ? x.row(r + kBlock + i) : from[i];
      transpose_strip(
          columns, out + r, ld, [&](int i, int64_t c) { return _mm512_loadu_si512(from[i] + c); }, [&](int i) { return then[i]; });
    }
  }
  transpose_tail(x, 0, full_r, full_c, columns, out, ld);
  transpose_tail(x, full_r, rows, 0, columns, out, ld);
}

// Two rows of bfloat16 are one row of words, so 32 rows x 16 columns are one block of words.
void transpose_halves(RowView<uint16_t> x, int64_t rows, int64_t columns, uint16_t* out, int64_t ld) {
  constexpr int64_t kRows = 2 * kBlock;
  const int64_t full_r = rows / kRows * kRows, full_c = columns / kBlock * kBlock;
  for (int64_t r = 0; r < full_r; r += kRows) {
    const uint16_t *from[kRows], *then[kRows];
    for (int i = 0; i < kRows; ++i) from[i] = x.row(r + i), then[i] = r + kRows + i < rows ? x.row(r + kRows + i) : from[i];
    const auto half = [](const uint16_t* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); };
    for (int64_t c = 0; c + kBlock <= columns; c += kBlock) {
      __m512i v[kBlock];
#pragma GCC unroll 16
      for (int i = 0; i < kBlock; ++i) v[i] = _mm512_or_si512(half(from[2 * i] + c), _mm512_slli_epi32(half(from[2 * i + 1] + c), 16));
      for (int64_t i = c / kBlock % 2; i < kRows; i += 2) __builtin_prefetch(then[i] + c);  // a block is half a line wide
      transpose_16x16(v);
#pragma GCC unroll 16
      for (int i = 0; i < kBlock; ++i) _mm512_storeu_si512(out + (c + i) * ld + r, v[kPlace[i]]);
    }
  }
  transpose_tail(x, 0, full_r, full_c, columns, out, ld);
  transpose_tail(x, full_r, rows, 0, columns, out, ld);
}
#else
template <class U>
void transpose_blocks(RowView<U> x, int64_t rows, int64_t columns, U* out, int64_t ld) {
  constexpr int64_t kBlock = 16;
  for (int64_t r = 0; r < rows; r += kBlock) {
    const int64_t r1 = r + kBlock < rows ? r + kBlock : rows;
    for (int64_t c = 0; c < columns; c += kBlock) {
      transpose_tail(x, r, r1, c, c + kBlock < columns ? c + kBlock : columns, out, ld);
    }
  }
}
void transpose_words(RowView<uint32_t> x, const uint32_t*, int64_t rows, int64_t columns, uint32_t* out, int64_t ld) {
  transpose_blocks(x, rows, columns, out, ld);
}
void transpose_halves(RowView<uint16_t> x, int64_t rows, int64_t columns, uint16_t* out, int64_t ld) {
  transpose_blocks(x, rows, columns, out, ld);
}
#endif

template <class U, class T>
RowView<U> as(RowView<T> x) {
  static_assert(sizeof(U) == sizeof(T));
  return {reinterpret_cast<const U*>(x.data), x.stride, x.index};
}

void transpose_any(RowView<Bf16> x, int64_t rows, int64_t columns, Bf16* out, int64_t ld, const Bf16* = nullptr) {
  transpose_halves(as<uint16_t>(x), rows, columns, reinterpret_cast<uint16_t*>(out), ld);
}
void transpose_any(RowView<float> x, int64_t rows, int64_t columns, float* out, int64_t ld, const float* next = nullptr) {
  transpose_words(as<uint32_t>(x), reinterpret_cast<const uint32_t*>(next), rows, columns, reinterpret_cast<uint32_t*>(out), ld);
}
void transpose_any(RowView<double> x, int64_t rows, int64_t columns, double* out, int64_t ld, const double* = nullptr) {
  transpose_tail(x, 0, rows, 0, columns, out, ld);
}

template <class T>
void transpose(RowView<T> x, int64_t rows, int64_t columns, T* out, int64_t ld, int64_t depth) {
  transpose_any(x, rows, columns, out, ld);
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = rows; r < depth; ++r) out[c * ld + r] = T{};
  }
}

// One row of pairs: out[2j] = even[j], out[2j + 1] = odd[j].
inline void interleave(const Bf16* even, const Bf16* odd, int64_t n, Bf16* out) {
  int64_t j = 0;
#if defined(MOESH_AVX512)
  using Row = uint16_t __attribute__((vector_size(64)));
  for (; j + 32 <= n; j += 32) {
    const Row a = load_bytes<Row>(even + j), b = load_bytes<Row>(odd + j);
    const Row low = __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12,
                                            44, 13, 45, 14, 46, 15, 47);
    const Row high = __builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58,
                                             27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
    __builtin_memcpy(out + 2 * j, &low, sizeof(Row));
    __builtin_memcpy(out + 2 * j + 32, &high, sizeof(Row));
  }
#endif
  for (; j < n; ++j) out[2 * j] = even[j], out[2 * j + 1] = odd[j];
}

template <class T>
void pack(RowView<T> x, const T* next, int64_t k, int64_t n, bool pairs, T* out, int64_t ld) {
  if constexpr (sizeof(T) == 2) {
    if (pairs) {
      int64_t r = 0;
      for (; r + 1 < k; r += 2) {
        prefetch_row(x, r + kRowsAhead, k, next, n), prefetch_row(x, r + kRowsAhead + 1, k, next, n);
        interleave(x.row(r), x.row(r + 1), n, out + r * ld);
      }
      if (r < k) {
        const T* last = x.row(r);
        for (int64_t j = 0; j < n; ++j) out[r * ld + 2 * j] = last[j], out[r * ld + 2 * j + 1] = T{};
      }
      return;
    }
  }
  for (int64_t r = 0; r < k; ++r) {
    prefetch_row(x, r + kRowsAhead, k, next, n);
    __builtin_memcpy(out + r * ld, x.row(r), static_cast<unsigned long>(n) * sizeof(T));
  }
}

template <class T>
void pack_transposed(const T* w, const T* next, int64_t stride, int64_t n, int64_t k, bool pairs, T* out, int64_t ld) {
  if constexpr (sizeof(T) == 2) {
    if (pairs) {  // pairs along k are words in w: transpose those
      const int64_t words = k / 2;
      if (stride % 2 == 0) {
        transpose_words({reinterpret_cast<const uint32_t*>(w), stride / 2, nullptr}, reinterpret_cast<const uint32_t*>(next), n, words,
                        reinterpret_cast<uint32_t*>(out), ld);
      } else {
        for (int64_t i = 0; i < words; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            out[2 * (i * ld + j)] = w[j * stride + 2 * i], out[2 * (i * ld + j) + 1] = w[j * stride + 2 * i + 1];
          }
        }
      }
      if (k % 2) {
        for (int64_t j = 0; j < n; ++j) {
          out[2 * (words * ld + j)] = w[j * stride + k - 1], out[2 * (words * ld + j) + 1] = T{};
        }
      }
      return;
    }
  }
  transpose_any(RowView<T>{w, stride, nullptr}, n, k, out, ld, next);
}

// ---- activations ----

inline double exp_of(double x) { return __builtin_exp(x); }
// Cody-Waite reduction and the polynomial of Cephes: within 2 ulp, and clamped so that the result is a normal number.
inline Floats exp_of(Floats x) {
#if defined(MOESH_AVX512)  // a NaN in the second operand stays
  x = __builtin_bit_cast(Floats, _mm512_min_ps(_mm512_set1_ps(88.0f), __builtin_bit_cast(__m512, x)));
  x = __builtin_bit_cast(Floats, _mm512_max_ps(_mm512_set1_ps(-87.0f), __builtin_bit_cast(__m512, x)));
#else
  x = x > 88.0f ? Floats{} + 88.0f : x;
  x = x < -87.0f ? Floats{} - 87.0f : x;
#endif
  const Floats shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the integer ends up in the low bits
  const Floats n = shifted - 12582912.0f;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Floats e = p * (r * r) + (r + 1.0f);
  return __builtin_bit_cast(Floats, __builtin_bit_cast(Words, e) + (__builtin_bit_cast(Words, shifted) << 23));
}

template <class V>
inline V sigmoid(V x) {
  return reciprocal(exp_of(-x) + 1);
}

template <class V>
struct Hidden {
  V h, dh_dg, dh_du;
};

template <bool kClamped, class V>
inline __attribute__((always_inline)) Hidden<V> hidden(V g, V u) {
  if constexpr (kClamped) {
    const V limit = V{} + 7, zero = V{};
    const V gc = g > limit ? limit : g;
    const V low = u < -limit ? -limit : u;
    const V uc = low > limit ? limit : low;
    const V alpha = splat<V>(1.702);
    const V s = sigmoid(alpha * gc), swish = gc * s;
    return {(uc + 1) * swish, g > limit ? zero : (uc + 1) * (s + alpha * swish * (1 - s)), uc == u ? swish : zero};
  } else {
    const V s = sigmoid(g), silu = g * s;
    return {silu * u, u * (s + silu * (1 - s)), silu};
  }
}

// What a loop reads is copied to locals first: the compiler cannot know that its stores leave the argument struct alone.
template <bool kClamped, class T>
void activate_rows(const Activate<T>& a) {
  using A = Accumulate<T>;
  const A *b1 = a.b1, *b3 = a.b3;
  const int64_t columns = a.columns;
  for (int64_t r = 0; r < a.rows; ++r) {
    const A pre = a.pre ? a.pre[r] : A(1), post = a.post ? a.post[r] : A(1);
    const A *g = a.g + r * a.ld_gu, *u = a.u + r * a.ld_gu;
    T* h = a.h + r * a.ld_h;
    for_lanes<A>(columns, [&](int64_t j, int64_t n) {
      put(h + j, post * hidden<kClamped>(pre * load(g + j, n) + load(b1 + j, n), pre * load(u + j, n) + load(b3 + j, n)).h, n);
    });
  }
}

template <class T>
void activate(const Activate<T>& a) {
  return a.clamped ? activate_rows<true>(a) : activate_rows<false>(a);
}

// kPlain: no biases and no scores before the experts.
template <bool kClamped, bool kPlain, class T>
void activate_backward_rows(const ActivateBackward<T>& a) {
  using A = Accumulate<T>;
  using V = typename LanesOf<A>::Vector;
  const A *b1 = a.b1, *b3 = a.b3;
  A *db1 = a.db1, *db3 = a.db3;
  const int64_t columns = a.columns;
  for (int64_t r = 0; r < a.rows; ++r) {
    const A pre = a.pre ? a.pre[r] : A(1), post = a.post ? a.post[r] : A(1);
    const T *g = a.g + r * a.ld_gu, *u = a.u + r * a.ld_gu;
    const A* dh = a.dh + r * a.ld_dh;
    T *dg = a.dg + r * a.ld_out, *du = a.du + r * a.ld_out, *h = a.h + r * a.ld_out;
    if (r + kSavedAhead < a.rows) {
      prefetch_bytes(g + kSavedAhead * a.ld_gu, columns);
      prefetch_bytes(u + kSavedAhead * a.ld_gu, columns);
    }
    V d_pre{}, d_post{};
    for_lanes<A>(columns, [&](int64_t j, int64_t n) {
      const V gj = load(g + j, n), uj = load(u + j, n), dhj = load(dh + j, n);
      Hidden<V> v;
      if constexpr (kPlain) v = hidden<kClamped>(gj, uj);
      else v = hidden<kClamped>(pre * gj + load(b1 + j, n), pre * uj + load(b3 + j, n));
      const V d = post * dhj, dgj = d * v.dh_dg, duj = d * v.dh_du;
      d_post += dhj * v.h;
      put(h + j, post * v.h, n);
      if constexpr (kPlain) {
        put(dg + j, dgj, n);
        put(du + j, duj, n);
      } else {
        d_pre += dgj * gj + duj * uj;
        if (db1) put(db1 + j, load(db1 + j, n) + dgj, n), put(db3 + j, load(db3 + j, n) + duj, n);
        put(dg + j, pre * dgj, n);
        put(du + j, pre * duj, n);
      }
    });
    if (a.d_pre) a.d_pre[r] += sum_of(d_pre);
    if (a.d_post) a.d_post[r] += sum_of(d_post);
  }
}

template <class T>
void activate_backward(const ActivateBackward<T>& a) {
  const bool plain = !a.db1 && !a.pre;
  if (a.clamped) return plain ? activate_backward_rows<true, true>(a) : activate_backward_rows<true, false>(a);
  return plain ? activate_backward_rows<false, true>(a) : activate_backward_rows<false, false>(a);
}

// ---- rows ----

template <class A>
void add_rows(const A* c, int64_t ld_c, int64_t rows, int64_t columns, const int64_t* index, int64_t first, const A* scale, const A* bias,
              A* acc, int64_t ld_acc) {
  for (int64_t r = 0; r < rows; ++r) {
    if (r + kSumsAhead < rows) {
      const A* next = acc + (index[r + kSumsAhead] - first) * ld_acc;
      for (int64_t j = 0; j < columns; j += 64 / static_cast<int64_t>(sizeof(A))) __builtin_prefetch(next + j, 1);
    }
    const A* from = c + r * ld_c;
    A* to = acc + (index[r] - first) * ld_acc;
    if (bias) {
      const A s = scale ? scale[r] : A(1);
      for_lanes<A>(columns, [&](int64_t j, int64_t n) { put(to + j, load(to + j, n) + (load(from + j, n) + s * load(bias + j, n)), n); });
    } else {
      for_lanes<A>(columns, [&](int64_t j, int64_t n) { put(to + j, load(to + j, n) + load(from + j, n), n); });
    }
  }
}

template <class T>
void put_rows(const Accumulate<T>* c, int64_t ld_c, int64_t rows, int64_t columns, const Accumulate<T>* scale, const Accumulate<T>* bias,
              T* out, int64_t ld_out) {
  using A = Accumulate<T>;
  for (int64_t r = 0; r < rows; ++r) {
    const A* from = c + r * ld_c;
    T* to = out + r * ld_out;
    if (bias) {
      const A s = scale ? scale[r] : A(1);
      for_lanes<A>(columns, [&](int64_t j, int64_t n) { put(to + j, load(from + j, n) + s * load(bias + j, n), n); });
    } else {
      for_lanes<A>(columns, [&](int64_t j, int64_t n) { put(to + j, load(from + j, n), n); });
    }
  }
}

// Past the caches: a line that is written whole need not be read first. The result is the same as put_rows.
template <class T>
void stream_rows(const Accumulate<T>* c, int64_t ld_c, int64_t rows, int64_t columns, T* out, int64_t ld_out) {
#if defined(MOESH_AVX512)
  if constexpr (sizeof(T) <= 4) {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    if (reinterpret_cast<uintptr_t>(out) % 64 == 0 && ld_out % kLine == 0 && columns % kLine == 0) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t j = 0; j < columns; j += kLine) {
          T line[kLine];
          for (int64_t i = 0; i < kLine; i += kLanes) put(line + i, load(c + r * ld_c + j + i));
          _mm512_stream_si512(reinterpret_cast<__m512i*>(out + r * ld_out + j), _mm512_loadu_si512(line));
        }
      }
      _mm_sfence();
      return;
    }
  }
#endif
  put_rows<T>(c, ld_c, rows, columns, nullptr, nullptr, out, ld_out);
}

template <class T>
void combine(const T* rows, int64_t stride, const int64_t* positions, int64_t k, int64_t columns, T* out) {
  using A = Accumulate<T>;
  for_lanes<A>(columns, [&](int64_t j, int64_t n) {
    typename LanesOf<A>::Vector sum{};
    for (int64_t i = 0; i < k; ++i) {
      if (positions[i] >= 0) sum += load(rows + positions[i] * stride + j, n);
    }
    put(out + j, sum, n);
  });
}

template <class T>
void sum_rows(RowView<T> x, int64_t rows, int64_t columns, const Accumulate<T>* scale, Accumulate<T>* out) {
  using A = Accumulate<T>;
  for (int64_t r = 0; r < rows; ++r) {
    const A s = scale ? scale[r] : A(1);
    const T* row = x.row(r);
    for_lanes<A>(columns, [&](int64_t j, int64_t n) { put(out + j, load(out + j, n) + s * load(row + j, n), n); });
  }
}

template <class T>
void dot_rows(RowView<T> x, int64_t rows, int64_t columns, const Accumulate<T>* v, Accumulate<T>* out) {
  using A = Accumulate<T>;
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x.row(r);
    typename LanesOf<A>::Vector sum{};
    for_lanes<A>(columns, [&](int64_t j, int64_t n) { sum += load(row + j, n) * load(v + j, n); });
    out[r] += sum_of(sum);
  }
}

void gemm(int64_t m, int64_t n, int64_t k, const double* a, int64_t lda, const double* b, int64_t ldb, double* c, int64_t ldc, bool add) {
  constexpr int64_t kRows = 4, kColumns = 16;
  for (int64_t i = 0; i < m; i += kRows) {
    const int64_t rows = m - i < kRows ? m - i : kRows;
    for (int64_t j = 0; j < n; j += kColumns) {
      const int64_t columns = n - j < kColumns ? n - j : kColumns;
      double acc[kRows][kColumns] = {};
      if (rows == kRows && columns == kColumns) {
        for (int64_t p = 0; p < k; ++p) {
          for (int64_t x = 0; x < kRows; ++x) {
            for (int64_t y = 0; y < kColumns; ++y) acc[x][y] += a[(i + x) * lda + p] * b[p * ldb + j + y];
          }
        }
      } else {
        for (int64_t p = 0; p < k; ++p) {
          for (int64_t x = 0; x < rows; ++x) {
            for (int64_t y = 0; y < columns; ++y) acc[x][y] += a[(i + x) * lda + p] * b[p * ldb + j + y];
          }
        }
      }
      for (int64_t x = 0; x < rows; ++x) {
        double* to = c + (i + x) * ldc + j;
        for (int64_t y = 0; y < columns; ++y) to[y] = add ? to[y] + acc[x][y] : acc[x][y];
      }
    }
  }
}

template <class T>
constexpr SimdOps<T> make_ops() {
  SimdOps<T> ops{transpose<T>,  pack<T>,    pack_transposed<T>, activate<T>, activate_backward<T>, add_rows<Accumulate<T>>,
                 put_rows<T>, stream_rows<T>, combine<T>, sum_rows<T>,        dot_rows<T>, nullptr};
  if constexpr (sizeof(T) == 8) ops.gemm = gemm;
  return ops;
}

}  // namespace

extern const SimdTable MOESH_SIMD;
const SimdTable MOESH_SIMD{make_ops<double>(), make_ops<float>(), make_ops<Bf16>()};

}  // namespace moesh::kernels::cpu
