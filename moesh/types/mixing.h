#pragma once
// Which placements may meet on one axis, and what comes out, with no communication. A `throw` is
// the compiler's message: what is wrong, and the cure.

#include "moesh/types/layout.h"

namespace moesh {

enum class Op { add, mul, linear };
enum class Unary { linear, nonlinear, over_features };
enum class Over { tokens, features, experts };

/// The placement of `a op b` on one axis. For Op::linear a is x, and b is the weight.
constexpr Place mix(Op op, Place a, Place b) {
  using enum Place;
  if (a == I && b == I) return I;
  if (a == I || b == I)
    throw "an invariant value (I) takes no part in split work: a parameter enters through use(w), any other value through enter<axis>(x)";
  if (op == Op::add && (a == P) != (b == P))
    throw "a partial sum (P) plus a whole value counts it once per rank: all_reduce or reduce_scatter the sum first, or add once<axis>(value), pad<axis>(shard)";
  if (op != Op::add && a == P && b == P)
    throw "a product of partial sums (P) is no sum of products: all_reduce<axis> one first";
  if ((a == P && varies(b)) || (b == P && varies(a)))
    throw "a partial sum (P) times a shard: all_reduce<axis> or reduce_scatter<axis> the sum first";
  if (op == Op::linear) {
    if (a == F && b == F) return P;
    if (a == F && b == R)
      throw "x has a slice of the features, the weight has all: make it F (row), or all_gather<axis>(x) first";
    if (a == T && b == F)
      throw "token shard times column shard, the forgotten gather: all_gather<axis>(x) first";
    if (b == E && a != E && a != R)
      throw "rows times expert weights, the forgotten all-to-all: to_experts<axis>(x) first";
    if (b == T) throw "a weight is never sharded by tokens: declare it I, F or E";
  }
  if (a == R) return b;
  if (b == R || a == b) return a;
  throw "different things vary over the ranks (tokens T, features F, experts E): all_gather<axis> one of them, or take rows to_experts / to_owners first";
}

/// The placement of a function of one tensor on one axis.
constexpr Place apply(Unary kind, Place a) {
  if (a == Place::P && kind != Unary::linear)
    throw "a nonlinear function of a partial sum (P) is not the sum of its values: all_reduce<axis> or reduce_scatter<axis> first";
  if (a == Place::F && kind == Unary::over_features)
    throw "a norm, softmax or top-k over features needs all of them and this rank holds a slice (F): all_gather<axis>(x) first, or use a vocabulary-parallel form";
  return a;
}

/// The placement of a sum over tokens, features or experts on one axis: P where these vary.
constexpr Place sum(Over over, Place a) {
  using enum Place;
  if (a == (over == Over::tokens ? T : over == Over::features ? F : E)) return P;
  if (over == Over::tokens && a == E)
    throw "these rows are at their experts (E): to_owners<axis>(x) first, or sum over experts";
  return a;
}

template <Layout A, Layout B>
constexpr A mix(Op op, A a, B b) {
  static_assert(std::same_as<A, B>,
                "a dense and a sparse tensor do not mix: cross with sparse(x) or dense(x) first");
  const auto p = places(a), q = places(b);
  return {mix(op, p[0], q[0]), mix(op, p[1], q[1]), mix(op, p[2], q[2])};
}
constexpr auto apply(Unary k, Layout auto a) {
  return each(a, [k](Place p) { return apply(k, p); });
}
constexpr auto sum(Over o, Layout auto a) {
  return each(a, [o](Place p) { return sum(o, p); });
}

/// backward() seeds 1 on every rank, which is right only for P and I.
constexpr auto check_loss(Layout auto a) {
  return each(a, [](Place p) {
    if (p == Place::R)
      throw "backward of a replicated loss (R) is off by the axis size: keep the sum P, or all_reduce<axis, I>";
    if (varies(p))
      throw "backward needs a loss that is P or I on every axis: sum over tokens first (sum<Over::tokens>)";
    return p;
  });
}

/// Logs, clips, optimizers and checkpoints read numbers that every rank has whole.
constexpr auto check_whole(Layout auto a) {
  return each(a, [](Place p) {
    if (p == Place::P) throw "this value is still a partial sum (P): all_reduce<axis> first";
    if (varies(p)) throw "this value is one rank's shard: sum it and all_reduce<axis> first";
    return p;
  });
}

}  // namespace moesh
