#pragma once
// Sums and copies of rows, and the GEMM of float64.
// A part of simd_impl.h: see there for the rules.

#include "moesh/kernels/cpu/simd_pack.h"

namespace moesh::kernels::cpu {
namespace {

template <class A>
void add_rows(const A* c, int64_t ld_c, int64_t rows, int64_t columns, const int32_t* index,
              int64_t first, const A* scale, const A* bias, A* acc, int64_t ld_acc) {
  for (int64_t r = 0; r < rows; ++r) {
    if (r + kSumsAhead < rows) {
      const A* next = acc + (index[r + kSumsAhead] - first) * ld_acc;
      for (int64_t j = 0; j < columns; j += 64 / static_cast<int64_t>(sizeof(A)))
        __builtin_prefetch(next + j, 1);
    }
    const A* from = c + r * ld_c;
    A* to = acc + (index[r] - first) * ld_acc;
    if (bias) {
      const A s = scale ? scale[r] : A(1);
      for_lanes<A>(columns, [&](int64_t j, int64_t n) {
        put(to + j, load(to + j, n) + (load(from + j, n) + s * load(bias + j, n)), n);
      });
    } else {
      for_lanes<A>(columns, [&](int64_t j, int64_t n) {
        put(to + j, load(to + j, n) + load(from + j, n), n);
      });
    }
  }
}

template <class T>
void put_rows(const Accumulate<T>* c, int64_t ld_c, int64_t rows, int64_t columns,
              const Accumulate<T>* scale, const Accumulate<T>* bias, T* out, int64_t ld_out) {
  using A = Accumulate<T>;
  for (int64_t r = 0; r < rows; ++r) {
    const A* from = c + r * ld_c;
    T* to = out + r * ld_out;
    if (bias) {
      const A s = scale ? scale[r] : A(1);
      for_lanes<A>(columns, [&](int64_t j, int64_t n) {
        put(to + j, load(from + j, n) + s * load(bias + j, n), n);
      });
    } else {
      for_lanes<A>(columns, [&](int64_t j, int64_t n) { put(to + j, load(from + j, n), n); });
    }
  }
}

// Past the caches: a line that is written whole need not be read first. The result is the same as
// put_rows.
template <class T>
void stream_rows(const Accumulate<T>* c, int64_t ld_c, int64_t rows, int64_t columns, T* out,
                 int64_t ld_out) {
#if defined(MOESH_AVX512)
  if constexpr (sizeof(T) <= 4) {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    if (reinterpret_cast<uintptr_t>(out) % 64 == 0 && ld_out % kLine == 0 && columns % kLine == 0) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t j = 0; j < columns; j += kLine) {
          T line[kLine];
          for (int64_t i = 0; i < kLine; i += kLanes) put(line + i, load(c + r * ld_c + j + i));
          _mm512_stream_si512(reinterpret_cast<__m512i*>(out + r * ld_out + j),
                              _mm512_loadu_si512(line));
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
void combine(const T* rows, int64_t stride, const int32_t* positions, int64_t k, int64_t columns,
             T* out) {
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
void sum_rows(RowView<T> x, int64_t rows, int64_t columns, const Accumulate<T>* scale,
              Accumulate<T>* out) {
  using A = Accumulate<T>;
  for (int64_t r = 0; r < rows; ++r) {
    const A s = scale ? scale[r] : A(1);
    const T* row = x.row(r);
    for_lanes<A>(columns, [&](int64_t j, int64_t n) {
      put(out + j, load(out + j, n) + s * load(row + j, n), n);
    });
  }
}

template <class T>
void dot_rows(RowView<T> x, int64_t rows, int64_t columns, const Accumulate<T>* v,
              Accumulate<T>* out) {
  using A = Accumulate<T>;
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x.row(r);
    typename LanesOf<A>::Vector sum{};
    for_lanes<A>(columns, [&](int64_t j, int64_t n) { sum += load(row + j, n) * load(v + j, n); });
    out[r] += sum_of(sum);
  }
}

void gemm(int64_t m, int64_t n, int64_t k, const double* a, int64_t lda, const double* b,
          int64_t ldb, double* c, int64_t ldc, bool add) {
  constexpr int64_t kRows = 4, kColumns = 16;
  for (int64_t i = 0; i < m; i += kRows) {
    const int64_t rows = m - i < kRows ? m - i : kRows;
    for (int64_t j = 0; j < n; j += kColumns) {
      const int64_t columns = n - j < kColumns ? n - j : kColumns;
      double acc[kRows][kColumns] = {};
      if (rows == kRows && columns == kColumns) {
        for (int64_t p = 0; p < k; ++p) {
          for (int64_t x = 0; x < kRows; ++x) {
            for (int64_t y = 0; y < kColumns; ++y)
              acc[x][y] += a[(i + x) * lda + p] * b[p * ldb + j + y];
          }
        }
      } else {
        for (int64_t p = 0; p < k; ++p) {
          for (int64_t x = 0; x < rows; ++x) {
            for (int64_t y = 0; y < columns; ++y)
              acc[x][y] += a[(i + x) * lda + p] * b[p * ldb + j + y];
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

}  // namespace
}  // namespace moesh::kernels::cpu
