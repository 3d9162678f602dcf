#pragma once
// The operands of the experts' GEMMs: rows on the left, panels of weights on the right.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "moesh/base/error.h"
#include "moesh/kernels/cpu/simd.h"

namespace moesh::kernels::cpu {

// Scratch memory of the workers of one call.

/// Bytes that Arena::take<T>(count) uses: whole cache lines.
template <class T>
std::int64_t space(std::int64_t count) {
  return (count * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * 64;
}

/// Memory of one worker during one task, handed out from the front.
class Arena {
 public:
  Arena(char* begin, std::int64_t bytes) : begin_(begin), left_(bytes) {}
  template <class T>
  T* take(std::int64_t count) {
    const std::int64_t bytes = space<T>(count);
    MOESH_CHECK(bytes <= left_, "scratch memory of a kernel is short by ", bytes - left_, " bytes");
    char* p = begin_;
    begin_ += bytes, left_ -= bytes;
    return reinterpret_cast<T*>(p);
  }

 private:
  char* begin_;
  std::int64_t left_;
};

/// `bytes` for each worker.
class Scratch {
 public:
  Scratch(std::int64_t workers, std::int64_t bytes)
      : bytes_(space<char>(bytes)), memory_(at::empty({workers * bytes_}, at::kByte)) {}
  Arena arena(std::int64_t worker) const {
    return {static_cast<char*>(memory_.data_ptr()) + worker * bytes_, bytes_};
  }

 private:
  std::int64_t bytes_;
  at::Tensor memory_;
};

// Small GEMMs on one thread, for blocks that are already packed: oneDNN's microkernels, which ATen
// exports.

/// Whether B operands of bfloat16 interleave their rows in pairs here. If so, k must be even (pad a
/// and b with zeros).
bool gemm_wants_pairs();

/// c [m, n] = a [m, k] b [k, n], or += if `add`; b as SimdOps::pack leaves it. Row-major, strides
/// lda, ldb, ldc. The library makes machine code for each new size, once per thread: m may be
/// anything (it is divided into pieces of few sizes), n and k should come from a small set.
template <class T>
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, const T* a, std::int64_t lda, const T* b,
          std::int64_t ldb, Accumulate<T>* c, std::int64_t ldc, bool add);

/// Gives the matrix unit back, if the library holds one for this thread.
void gemm_done();

using std::int64_t;

constexpr int64_t kPanel = kPanelColumns;
constexpr int64_t kPanelBytes = 1 << 18;  // a quarter of a second-level cache

/// Inner rows of a panel.
template <class T>
constexpr int64_t kDepth = kPanelBytes / (kPanel * static_cast<int64_t>(sizeof(T)));

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Calls f with a value of the element type.
template <class F>
auto for_dtype(at::ScalarType dtype, const F& f) {
  switch (dtype) {
    case at::kDouble: return f(double{});
    case at::kFloat: return f(float{});
    default: return f(Bf16{});
  }
}

template <class T>
bool wants_pairs() {
  return sizeof(T) == 2 && gemm_wants_pairs();
}

// The inner dimension as the GEMM sees it.
template <class T>
int64_t padded(int64_t k) {
  return wants_pairs<T>() ? k + k % 2 : k;
}

/// The inner dimension of a product over n rows, which may be any number: rounded up so that the
/// library sees few different ones.
template <class T>
int64_t rounded_depth(int64_t n) {
  return n <= 64 ? padded<T>(n) : divide_up(n, 8) * 8;
}

/// A weight [e, rows, columns] as the right operand: itself (inner dimension is its rows), or
/// transposed.
template <class T>
struct Right {
  const T* data;
  int64_t rows, columns;
  bool transposed;
  int64_t depth() const { return transposed ? columns : rows; }
};

/// In which order panels are asked for: all columns of one expert, or the same columns of one
/// expert after another.
enum class Walk { columns, experts };

/// Packs panels of a Right, and remembers the last one.
template <class T>
class Panel {
 public:
  static int64_t size(int64_t depth) { return std::min(padded<T>(depth), kDepth<T>) * kPanel; }
  Panel(const Right<T>& right, Walk walk, Arena& arena)
      : right_(right), walk_(walk), memory_(arena.take<T>(size(right.depth()))) {}

  struct Operand {
    const T* data;
    int64_t ld;
  };
  /// Inner rows [k0, k0 + k), columns [c0, c0 + n) of the weight of `expert`.
  Operand get(int64_t expert, int64_t k0, int64_t k, int64_t c0, int64_t n) {
    const int64_t size = right_.rows * right_.columns;
    const T* w = right_.data + expert * size +
                 (right_.transposed ? c0 * right_.columns + k0 : k0 * right_.columns + c0);
    const bool pairs = wants_pairs<T>();
    if (!right_.transposed && !pairs)
      return {w, right_.columns};  // a copy would cost more than it saves
    if (expert != expert_ || k0 != k0_ || c0 != c0_) {
      const T* next = w + (walk_ == Walk::experts ? size
                           : right_.transposed    ? n * right_.columns
                                                  : n);
      if (right_.transposed)
        simd_ops<T>().pack_transposed(w, next, right_.columns, n, k, pairs, memory_);
      else
        simd_ops<T>().pack({w, right_.columns, nullptr}, next, k, padded<T>(k), n, pairs, memory_);
      expert_ = expert, k0_ = k0, c0_ = c0;
    }
    return {memory_, kPanel};
  }

 private:
  const Right<T>& right_;
  Walk walk_;
  T* memory_;
  int64_t expert_ = -1, k0_ = -1, c0_ = -1;
};

/// c [m, n] (+)= a [m, depth] times columns [c0, c0 + n) of the expert's weight.
template <class T>
void multiply(int64_t m, int64_t n, int64_t c0, const T* a, int64_t lda, const Right<T>& right,
              Panel<T>& panel, int64_t expert, Accumulate<T>* c, int64_t ldc, bool add) {
  if (right.depth() == 0 && !add) {  // a rank that has none of the F: its products are zero
    for (int64_t r = 0; r < m; ++r) std::fill_n(c + r * ldc, n, Accumulate<T>(0));
  }
  for (int64_t k0 = 0; k0 < right.depth(); k0 += kDepth<T>) {
    const int64_t k = std::min(kDepth<T>, right.depth() - k0);
    const auto b = panel.get(expert, k0, k, c0, n);
    gemm<T>(m, n, padded<T>(k), a + k0, lda, b.data, b.ld, c, ldc, add || k0 > 0);
  }
}

/// c [m, n] (+)= a [m, k] b [k, n] for a long k.
template <class T>
void multiply_long(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b,
                   int64_t ldb, Accumulate<T>* c, int64_t ldc, bool add) {
  constexpr int64_t kPiece = 256;
  for (int64_t k0 = 0; k0 < k; k0 += kPiece) {
    gemm<T>(m, n, std::min(kPiece, k - k0), a + k0, lda, b + k0 * ldb, ldb, c, ldc, add || k0 > 0);
  }
}

/// The rows as a left operand: in place if they can be, else gathered into `scratch` (stride
/// padded(columns)).
template <class T>
typename Panel<T>::Operand left_operand(RowView<T> rows, int64_t m, int64_t columns, T* scratch) {
  const int64_t ld = padded<T>(columns);
  if (!rows.index && ld == columns) return {rows.data, rows.stride};
  for (int64_t r = 0; r < m; ++r) {
    std::memcpy(scratch + r * ld, rows.row(r), static_cast<size_t>(columns) * sizeof(T));
    if (ld > columns) scratch[r * ld + columns] = T{};
  }
  return {scratch, ld};
}

}  // namespace moesh::kernels::cpu
