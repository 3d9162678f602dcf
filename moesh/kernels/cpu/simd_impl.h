// Included once by each simd_*.cpp, which defines MOESH_SIMD (a name for the instruction set) and is compiled with its flags.
// Everything here has internal linkage: a function that the linker could share between two instruction sets would crash
// older processors. For the same reason nothing is included that has inline functions of its own.

#include "moesh/kernels/cpu/simd.h"

namespace moesh::kernels::cpu {
namespace {

using std::int64_t;
using std::uint16_t;
using std::uint32_t;

inline float load(const Bf16* x) { return __builtin_bit_cast(float, uint32_t{x->bits} << 16); }
inline float load(const float* x) { return *x; }
inline double load(const double* x) { return *x; }

inline void put(Bf16* out, float x) {  // round to nearest even; a NaN stays one
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out->bits = static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}
inline void put(float* out, float x) { *out = x; }
inline void put(double* out, double x) { *out = x; }

// ---- packing ----

template <class U>
inline void transpose_tail(RowView<U> x, int64_t r0, int64_t r1, int64_t c0, int64_t c1, U* out, int64_t ld) {
  for (int64_t r = r0; r < r1; ++r) {
    const U* row = x.row(r);
    for (int64_t c = c0; c < c1; ++c) out[c * ld + r] = row[c];
  }
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int64_t kBlock = 16;
using Words = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));

template <class V, class U>
inline V load_vector(const U* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

// 16 rows of 16 words become 16 columns: four rounds that exchange ever larger blocks.
inline __attribute__((always_inline)) void transpose_16x16(Words* r) {
  Words t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const Words a = t[i + j], b = t[i + j + 2];
      r[i + 2 * j] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      r[i + 2 * j + 1] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  }
  for (int i = 0; i < 16; i += 8) {
    for (int j = 0; j < 4; ++j) {
      const Words a = r[i + j], b = r[i + j + 4];
      t[i + j] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
      t[i + j + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
  }
  for (int j = 0; j < 8; ++j) {
    r[j] = __builtin_shufflevector(t[j], t[j + 8], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    r[j + 8] = __builtin_shufflevector(t[j], t[j + 8], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
}

void transpose_words(RowView<uint32_t> x, int64_t rows, int64_t columns, uint32_t* out, int64_t ld) {
  const int64_t full_r = rows / kBlock * kBlock, full_c = columns / kBlock * kBlock;
  for (int64_t r = 0; r < full_r; r += kBlock) {
    const uint32_t* from[kBlock];
    for (int i = 0; i < kBlock; ++i) from[i] = x.row(r + i);
    for (int64_t c = 0; c < full_c; c += kBlock) {
      Words v[kBlock];
      for (int i = 0; i < kBlock; ++i) v[i] = load_vector<Words>(from[i] + c);
      transpose_16x16(v);
      for (int i = 0; i < kBlock; ++i) __builtin_memcpy(out + (c + i) * ld + r, &v[i], sizeof(Words));
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
    const uint16_t* from[kRows];
    for (int i = 0; i < kRows; ++i) from[i] = x.row(r + i);
    for (int64_t c = 0; c < full_c; c += kBlock) {
      Words v[kBlock];
      for (int i = 0; i < kBlock; ++i) {
        const Words even = __builtin_convertvector(load_vector<Halves>(from[2 * i] + c), Words);
        const Words odd = __builtin_convertvector(load_vector<Halves>(from[2 * i + 1] + c), Words);
        v[i] = even | (odd << 16);
      }
      transpose_16x16(v);
      for (int i = 0; i < kBlock; ++i) __builtin_memcpy(out + (c + i) * ld + r, &v[i], sizeof(Words));
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
void transpose_words(RowView<uint32_t> x, int64_t rows, int64_t columns, uint32_t* out, int64_t ld) {
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

void transpose_any(RowView<Bf16> x, int64_t rows, int64_t columns, Bf16* out, int64_t ld) {
  transpose_halves(as<uint16_t>(x), rows, columns, reinterpret_cast<uint16_t*>(out), ld);
}
void transpose_any(RowView<float> x, int64_t rows, int64_t columns, float* out, int64_t ld) {
  transpose_words(as<uint32_t>(x), rows, columns, reinterpret_cast<uint32_t*>(out), ld);
}
void transpose_any(RowView<double> x, int64_t rows, int64_t columns, double* out, int64_t ld) {
  transpose_tail(x, 0, rows, 0, columns, out, ld);
}

template <class T>
void transpose(RowView<T> x, int64_t rows, int64_t columns, T* out, int64_t ld) {
  transpose_any(x, rows, columns, out, ld);
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = rows; r < ld; ++r) out[c * ld + r] = T{};
  }
}

// One row of pairs: out[2j] = even[j], out[2j + 1] = odd[j].
inline void interleave(const Bf16* even, const Bf16* odd, int64_t n, Bf16* out) {
  const auto* a = reinterpret_cast<const uint16_t*>(even);
  const auto* b = reinterpret_cast<const uint16_t*>(odd);
  auto* words = reinterpret_cast<char*>(out);
  for (int64_t j = 0; j < n; ++j) {
    const uint32_t word = uint32_t{a[j]} | uint32_t{b[j]} << 16;
    __builtin_memcpy(words + 4 * j, &word, 4);
  }
}

template <class T>
void pack(RowView<T> x, int64_t k, int64_t n, bool pairs, T* out, int64_t ld) {
  if constexpr (sizeof(T) == 2) {
    if (pairs) {
      int64_t r = 0;
      for (; r + 1 < k; r += 2) interleave(x.row(r), x.row(r + 1), n, out + r * ld);
      if (r < k) {
        const T* last = x.row(r);
        for (int64_t j = 0; j < n; ++j) out[r * ld + 2 * j] = last[j], out[r * ld + 2 * j + 1] = T{};
      }
      return;
    }
  }
  for (int64_t r = 0; r < k; ++r) __builtin_memcpy(out + r * ld, x.row(r), static_cast<unsigned long>(n) * sizeof(T));
}

template <class T>
void pack_transposed(const T* w, int64_t stride, int64_t n, int64_t k, bool pairs, T* out, int64_t ld) {
  if constexpr (sizeof(T) == 2) {
    if (pairs) {  // pairs along k are words in w: transpose those
      const int64_t words = k / 2;
      if (stride % 2 == 0) {
        transpose_words({reinterpret_cast<const uint32_t*>(w), stride / 2, nullptr}, n, words, reinterpret_cast<uint32_t*>(out), ld);
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
  transpose_any(RowView<T>{w, stride, nullptr}, n, k, out, ld);
}

// ---- activations ----

inline double exp_of(double x) { return __builtin_exp(x); }
// Cody-Waite reduction and the polynomial of Cephes: within 2 ulp, and clamped so that the result is a normal number.
inline float exp_of(float x) {
  x = x > 88.0f ? 88.0f : x;
  x = x < -87.0f ? -87.0f : x;
  const float shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the integer ends up in the low bits
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float e = p * (r * r) + r + 1.0f;
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, e) + (__builtin_bit_cast(uint32_t, shifted) << 23));
}

template <class A>
inline A sigmoid(A x) {
  return A(1) / (A(1) + exp_of(-x));
}

template <class A>
struct Hidden {
  A h, dh_dg, dh_du;
};

template <bool kClamped, class A>
inline Hidden<A> hidden(A g, A u) {
  if constexpr (kClamped) {
    constexpr A limit = 7, alpha = A(1.702);
    const A gc = g > limit ? limit : g;
    const A low = u < -limit ? -limit : u;
    const A uc = low > limit ? limit : low;
    const A s = sigmoid(alpha * gc), swish = gc * s;
    return {(uc + 1) * swish, g > limit ? A(0) : (uc + 1) * (s + alpha * swish * (1 - s)), uc == u ? swish : A(0)};
  } else {
    const A s = sigmoid(g), silu = g * s;
    return {silu * u, u * (s + silu * (1 - s)), silu};
  }
}

template <bool kClamped, class T>
void activate_rows(const Activate<T>& a) {
  using A = Accumulate<T>;
  for (int64_t r = 0; r < a.rows; ++r) {
    const A pre = a.pre ? a.pre[r] : A(1), post = a.post ? a.post[r] : A(1);
    const A* __restrict g = a.g + r * a.ld_gu;
    const A* __restrict u = a.u + r * a.ld_gu;
    T* __restrict h = a.h + r * a.ld_h;
#pragma omp simd
    for (int64_t j = 0; j < a.columns; ++j) {
      put(h + j, post * hidden<kClamped>(pre * g[j] + a.b1[j], pre * u[j] + a.b3[j]).h);
    }
  }
}

template <class T>
void activate(const Activate<T>& a) {
  return a.clamped ? activate_rows<true>(a) : activate_rows<false>(a);
}

template <bool kClamped, class T>
void activate_backward_rows(const ActivateBackward<T>& a) {
  using A = Accumulate<T>;
  for (int64_t r = 0; r < a.rows; ++r) {
    const A pre = a.pre ? a.pre[r] : A(1), post = a.post ? a.post[r] : A(1);
    const T* __restrict g = a.g + r * a.ld_gu;
    const T* __restrict u = a.u + r * a.ld_gu;
    const A* __restrict dh = a.dh + r * a.ld_dh;
    T* __restrict dg = a.dg + r * a.ld_out;
    T* __restrict du = a.du + r * a.ld_out;
    T* __restrict h = a.h + r * a.ld_out;
    A d_pre = 0, d_post = 0;
    if (!a.db1) {
#pragma omp simd reduction(+ : d_pre, d_post)
      for (int64_t j = 0; j < a.columns; ++j) {
        const A gj = load(g + j), uj = load(u + j);
        const auto v = hidden<kClamped>(pre * gj + a.b1[j], pre * uj + a.b3[j]);
        const A d = post * dh[j], dgj = d * v.dh_dg, duj = d * v.dh_du;
        d_pre += dgj * gj + duj * uj;
        d_post += dh[j] * v.h;
        put(dg + j, pre * dgj);
        put(du + j, pre * duj);
        put(h + j, post * v.h);
      }
    } else {
      A* __restrict db1 = a.db1;
      A* __restrict db3 = a.db3;
#pragma omp simd reduction(+ : d_pre, d_post)
      for (int64_t j = 0; j < a.columns; ++j) {
        const A gj = load(g + j), uj = load(u + j);
        const auto v = hidden<kClamped>(pre * gj + a.b1[j], pre * uj + a.b3[j]);
        const A d = post * dh[j], dgj = d * v.dh_dg, duj = d * v.dh_du;
        d_pre += dgj * gj + duj * uj;
        d_post += dh[j] * v.h;
        db1[j] += dgj;
        db3[j] += duj;
        put(dg + j, pre * dgj);
        put(du + j, pre * duj);
        put(h + j, post * v.h);
      }
    }
    if (a.d_pre) a.d_pre[r] += d_pre;
    if (a.d_post) a.d_post[r] += d_post;
  }
}

template <class T>
void activate_backward(const ActivateBackward<T>& a) {
  return a.clamped ? activate_backward_rows<true>(a) : activate_backward_rows<false>(a);
}

// ---- rows ----

template <class A>
void add_rows(const A* c, int64_t ld_c, int64_t rows, int64_t columns, const int64_t* index, int64_t first, const A* scale, const A* bias,
              A* acc, int64_t ld_acc) {
  constexpr int64_t kAhead = 4;  // rows are at random places: ask for them early
  for (int64_t r = 0; r < rows; ++r) {
    if (r + kAhead < rows) {
      const A* next = acc + (index[r + kAhead] - first) * ld_acc;
      for (int64_t j = 0; j < columns; j += 64 / static_cast<int64_t>(sizeof(A))) __builtin_prefetch(next + j, 1);
    }
    const A* __restrict from = c + r * ld_c;
    A* __restrict to = acc + (index[r] - first) * ld_acc;
    if (bias) {
      const A s = scale ? scale[r] : A(1);
      for (int64_t j = 0; j < columns; ++j) to[j] += from[j] + s * bias[j];
    } else {
      for (int64_t j = 0; j < columns; ++j) to[j] += from[j];
    }
  }
}

template <class T>
void put_rows(const Accumulate<T>* c, int64_t ld_c, int64_t rows, int64_t columns, const Accumulate<T>* scale, const Accumulate<T>* bias,
              T* out, int64_t ld_out) {
  for (int64_t r = 0; r < rows; ++r) {
    const Accumulate<T>* __restrict from = c + r * ld_c;
    T* __restrict to = out + r * ld_out;
    if (bias) {
      const auto s = scale ? scale[r] : Accumulate<T>(1);
      for (int64_t j = 0; j < columns; ++j) put(to + j, from[j] + s * bias[j]);
    } else {
      for (int64_t j = 0; j < columns; ++j) put(to + j, from[j]);
    }
  }
}

template <class T>
void combine(const T* rows, int64_t stride, const int64_t* positions, int64_t k, int64_t columns, T* out) {
  using A = Accumulate<T>;
  constexpr int64_t kChunk = 64;
  for (int64_t j0 = 0; j0 < columns; j0 += kChunk) {
    const int64_t n = columns - j0 < kChunk ? columns - j0 : kChunk;
    A acc[kChunk] = {};
    for (int64_t i = 0; i < k; ++i) {
      if (positions[i] < 0) continue;
      const T* from = rows + positions[i] * stride + j0;
      for (int64_t j = 0; j < n; ++j) acc[j] += load(from + j);
    }
    for (int64_t j = 0; j < n; ++j) put(out + j0 + j, acc[j]);
  }
}

template <class T>
void sum_rows(RowView<T> x, int64_t rows, int64_t columns, const Accumulate<T>* scale, Accumulate<T>* __restrict out) {
  for (int64_t r = 0; r < rows; ++r) {
    const auto s = scale ? scale[r] : Accumulate<T>(1);
    const T* __restrict row = x.row(r);
    for (int64_t j = 0; j < columns; ++j) out[j] += s * load(row + j);
  }
}

template <class T>
void dot_rows(RowView<T> x, int64_t rows, int64_t columns, const Accumulate<T>* v, Accumulate<T>* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x.row(r);
    Accumulate<T> sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < columns; ++j) sum += load(row + j) * v[j];
    out[r] += sum;
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
                 put_rows<T>, combine<T>, sum_rows<T>,        dot_rows<T>, nullptr};
  if constexpr (sizeof(T) == 8) ops.gemm = gemm;
  return ops;
}

}  // namespace

extern const SimdTable MOESH_SIMD;
const SimdTable MOESH_SIMD{make_ops<double>(), make_ops<float>(), make_ops<Bf16>()};

}  // namespace moesh::kernels::cpu
