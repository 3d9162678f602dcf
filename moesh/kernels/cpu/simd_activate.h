#pragma once
// The activations and their derivatives.
// A part of simd_impl.h: see there for the rules.

#include "moesh/kernels/cpu/simd_pack.h"

namespace moesh::kernels::cpu {
namespace {

inline double exp_of(double x) { return __builtin_exp(x); }
// Cody-Waite reduction and the polynomial of Cephes: within 2 ulp, and clamped so that the result
// is a normal number.
inline Floats exp_of(Floats x) {
#if defined(MOESH_AVX512)  // a NaN in the second operand stays
  x = __builtin_bit_cast(Floats,
                         _mm512_min_ps(_mm512_set1_ps(88.0f), __builtin_bit_cast(__m512, x)));
  x = __builtin_bit_cast(Floats,
                         _mm512_max_ps(_mm512_set1_ps(-87.0f), __builtin_bit_cast(__m512, x)));
#else
  x = x > 88.0f ? Floats{} + 88.0f : x;
  x = x < -87.0f ? Floats{} - 87.0f : x;
#endif
  const Floats shifted =
      x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the integer ends up in the low bits
  const Floats n = shifted - 12582912.0f;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Floats e = p * (r * r) + (r + 1.0f);
  return __builtin_bit_cast(
      Floats, __builtin_bit_cast(Words, e) + (__builtin_bit_cast(Words, shifted) << 23));
}

template <class V>
inline V sigmoid(V x) {
  return reciprocal(exp_of(-x) + 1);
}

template <class V>
struct VectorActivation {
  V h, dh_dg, dh_du;
};

template <bool kClamped, class V>
inline __attribute__((always_inline)) VectorActivation<V> hidden(V g, V u) {
  if constexpr (kClamped) {
    const V limit = V{} + 7, zero = V{};
    const V gc = g > limit ? limit : g;
    const V low = u < -limit ? -limit : u;
    const V uc = low > limit ? limit : low;
    const V alpha = splat<V>(1.702);
    const V s = sigmoid(alpha * gc), swish = gc * s;
    return {(uc + 1) * swish, g > limit ? zero : (uc + 1) * (s + alpha * swish * (1 - s)),
            uc == u ? swish : zero};
  } else {
    const V s = sigmoid(g), silu = g * s;
    return {silu * u, u * (s + silu * (1 - s)), silu};
  }
}

// Values that a loop reads are copied to locals first: the compiler cannot know that its stores
// leave the argument struct only.
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
      put(h + j,
          post * hidden<kClamped>(pre * load(g + j, n) + load(b1 + j, n),
                                  pre * load(u + j, n) + load(b3 + j, n))
                     .h,
          n);
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
      VectorActivation<V> v;
      if constexpr (kPlain)
        v = hidden<kClamped>(gj, uj);
      else
        v = hidden<kClamped>(pre * gj + load(b1 + j, n), pre * uj + load(b3 + j, n));
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
  if (a.clamped)
    return plain ? activate_backward_rows<true, true>(a) : activate_backward_rows<true, false>(a);
  return plain ? activate_backward_rows<false, true>(a) : activate_backward_rows<false, false>(a);
}

}  // namespace
}  // namespace moesh::kernels::cpu
