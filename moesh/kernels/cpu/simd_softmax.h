#pragma once
// Rows of attention scores: softmax over a range of each, and its derivative.
// A part of simd_impl.h: see there for the rules.

#include "moesh/kernels/cpu/simd_activate.h"

namespace moesh::kernels::cpu {
namespace {

inline double largest(double a, double b) { return a > b ? a : b; }
inline Floats largest(Floats a, Floats b) { return a > b ? a : b; }
inline double largest_of(double x) { return x; }
inline float largest_of(Floats x) {
  float m = x[0];
  for (int64_t i = 1; i < kLanes; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

// Whole vectors that cover [begin, end); rows have room for them.
template <class A>
struct Cover {
  static constexpr int64_t n = LanesOf<A>::kCount;
  int64_t begin, end;
  Cover(int64_t b, int64_t e) : begin(b / n * n), end((e + n - 1) / n * n) {}
};

template <class T>
inline void zero_outside(T* row, int64_t begin, int64_t end, int64_t columns) {
  for (int64_t j = 0; j < begin; ++j) row[j] = T{};
  for (int64_t j = end; j < columns; ++j) row[j] = T{};
}

template <class T>
void softmax(const Softmax<T>& a) {
  using A = Accumulate<T>;
  using V = typename LanesOf<A>::Vector;
  constexpr int64_t n = LanesOf<A>::kCount;
  constexpr A kNone = A(-1e30);
  const A scale = a.scale;
  for (int64_t r = 0; r < a.rows; ++r) {
    const int64_t begin = a.begin[r], end = a.end[r];
    const Cover<A> all(begin, end);
    A* s = a.s + r * a.ld;
    T* p = a.p + r * a.ld;
    for (int64_t j = all.begin; j < begin; ++j) s[j] = kNone;
    for (int64_t j = end; j < all.end; ++j) s[j] = kNone;
    V top = load(s + all.begin);
    for (int64_t j = all.begin + n; j < all.end; j += n) top = largest(top, load(s + j));
    A m = scale * largest_of(top);
    if (a.has_sink && a.sink > m) m = a.sink;
    V sums{};
    for (int64_t j = all.begin; j < all.end; j += n) {
      const V e = exp_of(scale * load(s + j) - m);
      put(s + j, e);
      sums += e;
    }
    const A sum = sum_of(sums) + (a.has_sink ? static_cast<A>(__builtin_exp(a.sink - m)) : A(0));
    const A inverse = 1 / sum;
    for (int64_t j = all.begin; j < all.end; j += n) put(p + j, load(s + j) * inverse);
    zero_outside(p, begin, end, a.columns);
    a.lse[r] = m + static_cast<A>(__builtin_log(sum));
  }
}

template <class T>
void softmax_backward(const SoftmaxBackward<T>& a) {
  using A = Accumulate<T>;
  using V = typename LanesOf<A>::Vector;
  constexpr int64_t n = LanesOf<A>::kCount;
  const A scale = a.scale;
  for (int64_t r = 0; r < a.rows; ++r) {
    const int64_t begin = a.begin[r], end = a.end[r];
    const Cover<A> all(begin, end);
    A *s = a.s + r * a.ld, *dp = a.dp + r * a.ld;
    T *p = a.p + r * a.ld, *ds = a.ds + r * a.ld;
    const A lse = a.lse[r];
    // Keys that the query does not see, and memory that was not written, must not count in the sum
    // below.
    for (int64_t j = all.begin; j < begin; ++j) s[j] = dp[j] = A(0);
    for (int64_t j = end; j < all.end; ++j) s[j] = dp[j] = A(0);
    V sums{};
    for (int64_t j = all.begin; j < all.end; j += n) {
      const V e = exp_of(scale * load(s + j) - lse);
      put(s + j, e);
      put(p + j, e);
      sums += e * load(dp + j);
    }
    const A delta = sum_of(sums);
    for (int64_t j = all.begin; j < all.end; j += n)
      put(ds + j, load(s + j) * (load(dp + j) - delta) * scale);
    zero_outside(p, begin, end, a.columns);
    zero_outside(ds, begin, end, a.columns);
    a.delta[r] = delta;
  }
}

}  // namespace
}  // namespace moesh::kernels::cpu
