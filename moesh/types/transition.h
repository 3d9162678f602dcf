#pragma once
// Changing the placement on one axis. `step` is the whole table; the backward step is not written
// anywhere, it is the step between the adjoints, so that it cannot be left out.

#include "moesh/types/mixing.h"

namespace moesh {

enum class Step { identity, all_gather, reduce_scatter, all_reduce, keep, pad };

/// The step that takes `from` to `to` on one axis.
constexpr Step step(Place from, Place to) {
  using enum Place;
  if (varies(from) && is_whole(to)) return Step::all_gather;
  if (from == P && varies(to)) return Step::reduce_scatter;
  if (from == P && is_whole(to)) return Step::all_reduce;
  if (from == I && to == R) return Step::identity;
  if (is_whole(from) && varies(to)) return Step::keep;
  if (varies(from) && to == P) return Step::pad;
  if (from == R && to == P)
    throw "R to P has no step of its own: once<axis>(x) counts the value on one rank";
  if (from == R && to == I)
    throw "R cannot become I, its gradient is a pending sum: leave it R, or end in all_reduce<axis, I>";
  throw "there is no such transition: tokens go to experts by to_experts<axis>, and back by to_owners<axis>";
}
constexpr Step backward_step(Place from, Place to) { return step(adjoint(to), adjoint(from)); }

/// The layout after the axes went to `to`, by the step that the name of the caller promises.
constexpr auto transition(Layout auto layout, Axes set, Place to, Step want) {
  using enum Step;
  const Place from = on(layout, set);
  if (want == all_gather && from == Place::P)
    throw "all_gather of a partial sum (P): all_reduce or reduce_scatter<axis> instead";
  if (want == all_gather && is_whole(from))
    throw "all_gather of a value that every rank has whole (R or I): nothing to gather";
  if ((want == all_reduce || want == reduce_scatter) && from != Place::P)
    throw "a reduction of something that is not a partial sum (P): a rank's own sum becomes one by as_term<axis>(x)";
  if (want == keep && !is_whole(from))
    throw "keep takes this rank's slice of a whole value (R or I)";
  if (want == pad && !varies(from))
    throw "pad makes a shard (T, F, E) a full-size term; a whole value goes by once<axis>(x)";
  if (want == identity && from != Place::I)
    throw "enter takes an invariant value (I); this one is in split work already";
  if (step(from, to) != want) throw "this function does not lead to that placement";
  return with(layout, set, to);
}

/// The crossing of the two views: all axes carry the same letter, or the last two agree with tp
/// (checked at run time: ep x etp is exactly tp).
constexpr Sparse cross(Dense l) {
  if (l.dp != l.cp)
    throw "the views cross where dp and cp carry one letter: bring x to Dense{a, a, a} or Dense{a, a, b} first";
  return {l.dp, l.tp, l.tp};
}
constexpr Dense cross(Sparse l) {
  if (l.ep != l.etp)
    throw "the views cross where ep and etp carry one letter: to_owners<ep>(x), reduce_scatter<etp> a P first";
  return {l.edp, l.edp, l.ep};
}
constexpr bool all_equal(Layout auto l) {
  return places(l)[0] == places(l)[1] && places(l)[1] == places(l)[2];
}

}  // namespace moesh
