#pragma once
#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

/// R or I -> T (or F, E): this rank's slice; backward: pad with zeros from R, all_gather from I.
template <Axes A, Place To = Place::T, auto L>
auto keep(const Tensor<L>& x, const Along& along) {
  [[maybe_unused]] constexpr auto steps = transition(L, A, To, Step::keep);
  return assume<with(L, A, To)>(raw::move(x.local(), A, on(L, A), To, along, "keep"));
}

}  // namespace moesh
