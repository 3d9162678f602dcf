#pragma once
#include "moesh/spmd/tensor.h"

namespace moesh {

/// T, F or E -> P with no change: this rank's value is its own term of a sum (counts, losses).
/// Backward: identity.
template <Axes A, auto L>
auto as_term(const Tensor<L>& x) {
  constexpr auto checked = [] {
    if (!varies(on(L, A)))
      throw "as_term takes a rank's own value (T, F, E); a whole value becomes a term by once<axis>(x)";
    return true;
  }();
  static_assert(checked);
  return assume<with(L, A, Place::P)>(x.local());
}

}  // namespace moesh
