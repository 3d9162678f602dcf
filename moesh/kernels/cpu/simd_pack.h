#pragma once
// GEMM operands in the layout that the microkernels want.
// A part of simd_impl.h: see there for the rules.

#include "moesh/kernels/cpu/simd_vectors.h"

namespace moesh::kernels::cpu {
namespace {

// Weights are read once, in strips which the processor's own prefetcher follows badly, and rows of
// tokens are at random places: ask for a row this many rows ahead, and after the last one for the
// strip that comes next.
constexpr int64_t kRowsAhead = 32;

constexpr int64_t kSavedAhead = 8;  // saved rows come back from memory, with more work on each
constexpr int64_t kSumsAhead = 8;   // and sums of tokens from a cache

template <class T>
inline void prefetch_bytes(const T* from, int64_t n) {
  const auto* bytes = reinterpret_cast<const char*>(from);
  for (int64_t i = 0; i < n * static_cast<int64_t>(sizeof(T)); i += 64)
    __builtin_prefetch(bytes + i);
}

template <class T>
inline void prefetch_row(RowView<T> x, int64_t r, int64_t rows, const T* next, int64_t n) {
  if (r < rows)
    prefetch_bytes(x.row(r), n);
  else if (next)
    prefetch_bytes(next + (r - rows) * x.stride, n);
}

template <class U>
inline void transpose_tail(RowView<U> x, int64_t r0, int64_t r1, int64_t c0, int64_t c1, U* out,
                           int64_t ld) {
  for (int64_t r = r0; r < r1; ++r) {
    const U* row = x.row(r);
    for (int64_t c = c0; c < c1; ++c)
      out[c * ld + r] = load_bytes<U>(row + c);  // pairs of an odd row are not aligned
  }
}

#if defined(MOESH_AVX512)
constexpr int64_t kBlock = 16;

// 16 rows of 16 words become 16 columns: four rounds that exchange ever larger blocks, each in
// place so that all stays in registers. Column c of the result ends up in r[kPlace[c]].
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

// A strip of 16 words of width: transposed to out, whose stride is ld words. row(i) gives its rows,
// ahead(i) what to fetch ahead.
template <class Row, class Ahead>
inline __attribute__((always_inline)) void transpose_strip(int64_t columns, uint32_t* out,
                                                           int64_t ld, const Row& row,
                                                           const Ahead& ahead) {
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

void transpose_words(RowView<uint32_t> x, const uint32_t* next, int64_t rows, int64_t columns,
                     uint32_t* out, int64_t ld) {
  const int64_t full_r = rows / kBlock * kBlock, full_c = columns / kBlock * kBlock;
  for (int64_t r = 0; r < full_r; r += kBlock) {
    if (!x.index) {
      const int64_t stride = x.stride;
      const uint32_t* base = x.row(r);
      const uint32_t* then = r + kBlock < full_r ? base + kBlock * stride : next ? next : base;
      transpose_strip(
          columns, out + r, ld,
          [=](int i, int64_t c) { return _mm512_loadu_si512(base + i * stride + c); },
          [=](int i) { return then + i * stride; });
    } else {
      const uint32_t *from[kBlock], *then[kBlock];
      for (int i = 0; i < kBlock; ++i)
        from[i] = x.row(r + i), then[i] = r + kBlock + i < rows ? x.row(r + kBlock + i) : from[i];
      transpose_strip(
          columns, out + r, ld, [&](int i, int64_t c) { return _mm512_loadu_si512(from[i] + c); },
          [&](int i) { return then[i]; });
    }
  }
  transpose_tail(x, 0, full_r, full_c, columns, out, ld);
  transpose_tail(x, full_r, rows, 0, columns, out, ld);
}

// Two rows of bfloat16 are one row of words, so 32 rows x 16 columns are one block of words.
void transpose_halves(RowView<uint16_t> x, int64_t rows, int64_t columns, uint16_t* out,
                      int64_t ld) {
  constexpr int64_t kRows = 2 * kBlock;
  const int64_t full_r = rows / kRows * kRows, full_c = columns / kBlock * kBlock;
  for (int64_t r = 0; r < full_r; r += kRows) {
    const uint16_t *from[kRows], *then[kRows];
    for (int i = 0; i < kRows; ++i)
      from[i] = x.row(r + i), then[i] = r + kRows + i < rows ? x.row(r + kRows + i) : from[i];
    const auto half = [](const uint16_t* p) {
      return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    };
    for (int64_t c = 0; c + kBlock <= columns; c += kBlock) {
      __m512i v[kBlock];
#pragma GCC unroll 16
      for (int i = 0; i < kBlock; ++i)
        v[i] = _mm512_or_si512(half(from[2 * i] + c),
                               _mm512_slli_epi32(half(from[2 * i + 1] + c), 16));
      for (int64_t i = c / kBlock % 2; i < kRows; i += 2)
        __builtin_prefetch(then[i] + c);  // a block is half a line wide
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
void transpose_words(RowView<uint32_t> x, const uint32_t*, int64_t rows, int64_t columns,
                     uint32_t* out, int64_t ld) {
  transpose_blocks(x, rows, columns, out, ld);
}
void transpose_halves(RowView<uint16_t> x, int64_t rows, int64_t columns, uint16_t* out,
                      int64_t ld) {
  transpose_blocks(x, rows, columns, out, ld);
}
#endif

template <class U, class T>
RowView<U> as(RowView<T> x) {
  static_assert(sizeof(U) == sizeof(T));
  return {reinterpret_cast<const U*>(x.data), x.stride, x.index};
}

void transpose_any(RowView<Bf16> x, int64_t rows, int64_t columns, Bf16* out, int64_t ld,
                   const Bf16* = nullptr) {
  transpose_halves(as<uint16_t>(x), rows, columns, reinterpret_cast<uint16_t*>(out), ld);
}
void transpose_any(RowView<float> x, int64_t rows, int64_t columns, float* out, int64_t ld,
                   const float* next = nullptr) {
  transpose_words(as<uint32_t>(x), reinterpret_cast<const uint32_t*>(next), rows, columns,
                  reinterpret_cast<uint32_t*>(out), ld);
}
void transpose_any(RowView<double> x, int64_t rows, int64_t columns, double* out, int64_t ld,
                   const double* = nullptr) {
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
    const Row low =
        __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40,
                                9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
    const Row high =
        __builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23,
                                55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
    __builtin_memcpy(out + 2 * j, &low, sizeof(Row));
    __builtin_memcpy(out + 2 * j + 32, &high, sizeof(Row));
  }
#endif
  for (; j < n; ++j) out[2 * j] = even[j], out[2 * j + 1] = odd[j];
}

template <class T>
void pack(RowView<T> x, const T* next, int64_t k, int64_t depth, int64_t n, bool pairs, T* out) {
  constexpr int64_t ld = kPanelColumns;
  int64_t r = 0;
  if constexpr (sizeof(T) == 2) {
    if (pairs) {
      for (; r + 1 < k; r += 2) {
        prefetch_row(x, r + kRowsAhead, k, next, n),
            prefetch_row(x, r + kRowsAhead + 1, k, next, n);
        interleave(x.row(r), x.row(r + 1), n, out + r * ld);
      }
      if (r < k) {
        constexpr T zeros[ld] = {};
        interleave(x.row(r), zeros, n, out + r * ld);
        r += 2;
      }
      for (; r < depth; r += 2) __builtin_memset(out + r * ld, 0, 2 * ld * sizeof(T));
      return;
    }
  }
  for (; r < k; ++r) {
    prefetch_row(x, r + kRowsAhead, k, next, n);
    __builtin_memcpy(out + r * ld, x.row(r), static_cast<unsigned long>(n) * sizeof(T));
  }
  for (; r < depth; ++r) __builtin_memset(out + r * ld, 0, ld * sizeof(T));
}

template <class T>
void pack_transposed(const T* w, const T* next, int64_t stride, int64_t n, int64_t k, bool pairs,
                     T* out) {
  constexpr int64_t ld = kPanelColumns;
  if constexpr (sizeof(T) == 2) {
    if (pairs) {  // pairs along k are words in w: transpose those
      const int64_t words = k / 2;
      if (stride % 2 == 0) {
        transpose_words({reinterpret_cast<const uint32_t*>(w), stride / 2, nullptr},
                        reinterpret_cast<const uint32_t*>(next), n, words,
                        reinterpret_cast<uint32_t*>(out), ld);
      } else {
        for (int64_t i = 0; i < words; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            out[2 * (i * ld + j)] = w[j * stride + 2 * i],
                              out[2 * (i * ld + j) + 1] = w[j * stride + 2 * i + 1];
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

}  // namespace
}  // namespace moesh::kernels::cpu
