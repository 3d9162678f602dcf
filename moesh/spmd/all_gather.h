#pragma once
#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

/// T, F or E -> R; backward: reduce_scatter. With To = I: backward keeps this rank's slice.
template <Axes A, Place To = Place::R, auto L>
auto all_gather(const Tensor<L>& x, const Along& along) {
  [[maybe_unused]] constexpr auto steps = transition(L, A, To, Step::all_gather);
  return assume<with(L, A, To)>(raw::move(x.local(), A, on(L, A), To, along, "all_gather"));
}

}  // namespace moesh
