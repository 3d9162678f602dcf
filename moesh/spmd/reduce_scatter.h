#pragma once
#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

/// P -> T (or F, E); backward: all_gather.
template <Axes A, Place To = Place::T, auto L>
auto reduce_scatter(const Tensor<L>& x, const Along& along) {
  [[maybe_unused]] constexpr auto steps = transition(L, A, To, Step::reduce_scatter);
  return assume<with(L, A, To)>(raw::move(x.local(), A, on(L, A), To, along, "reduce_scatter"));
}

}  // namespace moesh
