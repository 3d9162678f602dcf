#pragma once
// The loops around the GEMMs: packing of operands, activations, row sums. They see raw pointers and
// no torch, and are compiled once for each instruction set (simd_*.cpp); `simd_ops<T>()` gives the
// best table that this processor can run.

#include <cstdint>

namespace moesh::kernels::cpu {

/// The bits of a bfloat16. (c10::BFloat16 has inline functions, which must not be compiled with
/// flags of one instruction set.)
struct Bf16 {
  std::uint16_t bits;
};

template <class T>
struct AccumulateOf {
  using Type = T;
};
template <>
struct AccumulateOf<Bf16> {
  using Type = float;
};
template <class T>
using Accumulate = typename AccumulateOf<T>::Type;

/// Columns of a packed B panel: four vectors of AVX-512.
constexpr std::int64_t kPanelColumns = 64;

/// Row r is at data + (index ? index[r] : r) * stride.
template <class T>
struct RowView {
  const T* data = nullptr;
  std::int64_t stride = 0;
  const std::int32_t* index = nullptr;

  // Always inlined: see simd_impl.h.
  [[gnu::always_inline]] const T* row(std::int64_t r) const {
    return data + (index ? index[r] : r) * stride;
  }
  [[gnu::always_inline]] RowView from(std::int64_t r, std::int64_t column) const {
    return index ? RowView{data + column, stride, index + r}
                 : RowView{data + r * stride + column, stride, nullptr};
  }
};

/// One block of rows of one expert and some of its F columns. g, u: GEMM outputs.  g' = pre * g +
/// b1,  u' = pre * u + b3, h = post * act(g', u').
template <class T>
struct Activate {
  using A = Accumulate<T>;
  bool clamped;
  std::int64_t rows, columns;
  const A* g;  // [rows, columns], stride ld_gu
  const A* u;
  std::int64_t ld_gu;
  const A* pre;   // [rows], null: 1
  const A* post;  // [rows], null: 1
  const A* b1;    // [columns]
  const A* b3;
  T* h;  // [rows, columns], stride ld_h
  std::int64_t ld_h;
};

/// The same block in backward. dh: gradient of h. Leaves pre * dg', pre * du', h; adds to d_pre or
/// d_post, db1, db3.
template <class T>
struct ActivateBackward {
  using A = Accumulate<T>;
  bool clamped;
  std::int64_t rows, columns;
  const T* g;  // as saved, stride ld_gu
  const T* u;
  std::int64_t ld_gu;
  const A* pre;
  const A* post;
  const A* b1;
  const A* b3;
  const A* dh;  // stride ld_dh
  std::int64_t ld_dh;
  T* dg;  // stride ld_out
  T* du;
  T* h;
  std::int64_t ld_out;
  A* d_pre;   // [rows], null: not wanted
  A* d_post;  // [rows], null: not wanted
  A* db1;     // [columns], null: not wanted
  A* db3;
};

/// Scores of a block of queries. Row r: p[j] = exp(scale * s[j] - lse) for j in [begin[r], end[r]),
/// which is not empty, and 0 elsewhere in [0, columns). Overwrites s. Rows have room up to the next
/// multiple of 16.
template <class T>
struct Softmax {
  using A = Accumulate<T>;
  std::int64_t rows, columns, ld;
  A scale;
  const std::int64_t *begin, *end;
  bool has_sink;
  A sink;
  A* s;
  T* p;
  A* lse;  // [rows]
};

/// The same in backward: p again from s and lse, and ds = scale * p * (dp - delta), delta = sum of
/// p * dp. Overwrites s and dp.
template <class T>
struct SoftmaxBackward {
  using A = Accumulate<T>;
  std::int64_t rows, columns, ld;
  A scale;
  const std::int64_t *begin, *end;
  A* s;
  A* dp;
  const A* lse;
  T* p;
  T* ds;
  A* delta;  // [rows]
};

template <class T>
struct SimdOps {
  using A = Accumulate<T>;
  /// out[c][r] = x[r][c], stride ld; zeros where r is in [rows, depth).
  void (*transpose)(RowView<T> x, std::int64_t rows, std::int64_t columns, T* out, std::int64_t ld,
                    std::int64_t depth);
  /// B panel [depth, n], n <= kPanelColumns, whose row r is x[r] for r < k and zeros above; stride
  /// kPanelColumns. `pairs` (depth is then even): rows 2i and 2i+1 interleaved. `next` (may be
  /// null): what the caller will pack after this; it is fetched ahead.
  void (*pack)(RowView<T> x, const T* next, std::int64_t k, std::int64_t depth, std::int64_t n,
               bool pairs, T* out);
  /// B panel [k, n] whose column j is w[j], of stride `stride`. `pairs`: k is rounded up, with
  /// zeros.
  void (*pack_transposed)(const T* w, const T* next, std::int64_t stride, std::int64_t n,
                          std::int64_t k, bool pairs, T* out);
  void (*activate)(const Activate<T>&);
  void (*activate_backward)(const ActivateBackward<T>&);
  void (*softmax)(const Softmax<T>&);
  void (*softmax_backward)(const SoftmaxBackward<T>&);
  /// acc[index[r] - first] += c[r] + scale[r] * bias; scale null: 1, bias null: 0.
  void (*add_rows)(const A* c, std::int64_t ld_c, std::int64_t rows, std::int64_t columns,
                   const std::int32_t* index, std::int64_t first, const A* scale, const A* bias,
                   A* acc, std::int64_t ld_acc);
  /// out[r] = c[r] + scale[r] * bias, rounded.
  void (*put_rows)(const A* c, std::int64_t ld_c, std::int64_t rows, std::int64_t columns,
                   const A* scale, const A* bias, T* out, std::int64_t ld_out);
  /// out[r] = c[r], rounded, for results that no one reads soon.
  void (*stream_rows)(const A* c, std::int64_t ld_c, std::int64_t rows, std::int64_t columns,
                      T* out, std::int64_t ld_out);
  /// out[j] = sum over k of rows[positions[k]][j], -1 is left out.
  void (*combine)(const T* rows, std::int64_t stride, const std::int32_t* positions, std::int64_t k,
                  std::int64_t columns, T* out);
  /// out[j] += sum over rows of scale[r] * x[r][j]; scale null: 1.
  void (*sum_rows)(RowView<T> x, std::int64_t rows, std::int64_t columns, const A* scale, A* out);
  /// out[r] += <x[r], v>.
  void (*dot_rows)(RowView<T> x, std::int64_t rows, std::int64_t columns, const A* v, A* out);
  /// c (+)= a b: only for float64, which the library's small-matrix kernels do not serve.
  void (*gemm)(std::int64_t m, std::int64_t n, std::int64_t k, const T* a, std::int64_t lda,
               const T* b, std::int64_t ldb, A* c, std::int64_t ldc, bool add);
};

/// The operations of one instruction set.
struct SimdTable {
  const char* name;
  SimdOps<double> f64;
  SimdOps<float> f32;
  SimdOps<Bf16> bf16;
};

/// Those that this processor runs, the widest first.
int num_simd_tables();
const SimdTable& simd_table(int i = 0);

template <class T>
const SimdOps<T>& simd_ops();
template <>
inline const SimdOps<double>& simd_ops() {
  return simd_table().f64;
}
template <>
inline const SimdOps<float>& simd_ops() {
  return simd_table().f32;
}
template <>
inline const SimdOps<Bf16>& simd_ops() {
  return simd_table().bf16;
}

}  // namespace moesh::kernels::cpu
