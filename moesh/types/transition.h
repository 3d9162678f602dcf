#pragma once
// Changing the placement on one axis. `step` is the whole table; the backward step is not written anywhere, it is the
// step between the adjoints, so that it cannot be left out.

#include "moesh/types/mixing.h"

namespace moesh {

enum class Step { identity, all_gather, reduce_scatter, all_reduce, keep, pad };

/// What takes `from` to `to` on one axis.
constexpr Step step(Place from, Place to) {
  using enum Place;
  if (varies(from) && is_whole(to)) return Step::all_gather;
  if (from == P && varies(to)) return Step::reduce_scatter;
  if (from == P && is_whole(to)) return Step::all_reduce;
  if (from == I && to == R) return Step::identity;
  if (is_whole(from) && varies(to)) return Step::keep;
  if (varies(from) && to == P) return Step::pad;
  if (from == R && to == P) throw "R to P has no step of its own: once<axis>(x) counts the value on one rank";
  if (from == R && to == I) throw "a replicated value (R) cannot become invariant: its gradient is a pending sum; leave it R, or reduce to I (all_reduce<axis, I>)";
  throw "there is no such transition: tokens go to experts by to_experts<axis>, and back by to_owners<axis>";
}

constexpr Step backward_step(Place from, Place to) { return step(adjoint(to), adjoint(from)); }

/// The two halves of a transition, ready for the autograd function.
struct Transition {
  Step forward, backward;
};

/// Checks that x is `from`-like on the axes and returns the pair of steps. `want` is the step the caller's name promises.
template <Layout L>
constexpr Transition transition(L layout, Axes set, Place to, Step want) {
  const Place from = on(layout, set);
  if (want == Step::all_gather && from == Place::P) throw "all_gather of a partial sum (P): reduce it instead, all_reduce<axis>(x) or reduce_scatter<axis>(x)";
  if (want == Step::all_gather && is_whole(from)) throw "all_gather of a value that every rank has whole (R or I): nothing to gather";
  if ((want == Step::all_reduce || want == Step::reduce_scatter) && from != Place::P)
    throw "a reduction of something that is not a partial sum (P): a rank's own sum becomes one by as_term<axis>(x)";
  if (want == Step::keep && !is_whole(from)) throw "keep takes this rank's slice of a whole value (R or I)";
  if (want == Step::pad && !varies(from)) throw "pad places a shard (T, F, E) in a full-size partial sum; once<axis>(x) makes a whole value P";
  if (want == Step::identity && from != Place::I) throw "enter takes an invariant value (I); this one is in split work already";
  const Step forward = step(from, to);
  if (forward != want) throw "this function does not lead to that placement";
  return {forward, backward_step(from, to)};
}

/// The crossing of the two views: all axes carry the same letter, or the last two agree with tp (checked at run time:
/// ep x etp is exactly tp).
constexpr Sparse cross(Dense l) {
  if (l.dp != l.cp) throw "the views cross where all axes carry the same letter (or dp and cp do, and ep x etp is tp): bring x to Dense{a, a, a} first";
  return {l.dp, l.tp, l.tp};
}
constexpr Dense cross(Sparse l) {
  if (l.ep != l.etp) throw "the views cross where all axes carry the same letter (or ep and etp do, and ep x etp is tp): bring rows home with to_owners<ep> and reduce over etp first";
  return {l.edp, l.edp, l.ep};
}
template <Layout L>
constexpr bool all_equal(L l) {
  const auto p = places(l);
  return p[0] == p[1] && p[1] == p[2];
}

}  // namespace moesh
