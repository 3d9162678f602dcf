#pragma once
#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

/// R or I -> P: kept on one rank, zero elsewhere, so that a later reduction counts it once (a bias
/// added to a partial sum). Backward: the same from R, identity from I.
template <Axes A, auto L>
auto once(const Tensor<L>& x) {
  constexpr Place from = on(L, A);
  constexpr auto checked = [] {
    if (!is_whole(from))
      throw "once takes a value that every rank has whole (R or I); a shard becomes a term by as_term<axis>(x)";
    return true;
  }();
  static_assert(checked);
  return assume<with(L, A, Place::P)>(raw::once(x.local(), A, from));
}

}  // namespace moesh
