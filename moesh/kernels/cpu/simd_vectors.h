#pragma once
// Vectors of the instruction set at hand, with loads and stores that convert.
// A part of simd_impl.h: see there for the rules.

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
inline Floats load(const Bf16* x) {
  return __builtin_bit_cast(Floats, widen(load_bytes<Halves>(x)) << 16);
}

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
#if defined(MOESH_AVX512)  // 14 bits and a Newton step, where a division takes as long as a whole
                           // exponential
  const Floats r = __builtin_bit_cast(Floats, _mm512_rcp14_ps(__builtin_bit_cast(__m512, x)));
  return r * (2.0f - x * r);
#else
  return 1.0f / x;
#endif
}

template <class V>
inline V splat(double x) {
  if constexpr (sizeof(V) == sizeof(double))
    return x;
  else
    return V{} + static_cast<float>(x);
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

/// n of the lanes from memory, zeros in the others. (No call to memcpy here: it would spill every
/// vector around it.)
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

}  // namespace
}  // namespace moesh::kernels::cpu
