#pragma once
#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

/// P -> R; backward: all_reduce. With To = I: backward is the identity.
template <Axes A, Place To = Place::R, auto L>
auto all_reduce(const Tensor<L>& x) {
  [[maybe_unused]] constexpr auto steps = transition(L, A, To, Step::all_reduce);
  return assume<with(L, A, To)>(raw::move(x.local(), A, on(L, A), To, Along{0}, "all_reduce"));
}

}  // namespace moesh
