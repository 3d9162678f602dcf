#pragma once
#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

/// I -> R: from here on the ranks do different work with it; backward: all_reduce.
template <Axes A, auto L>
auto enter(const Tensor<L>& x) {
  [[maybe_unused]] constexpr auto steps = transition(L, A, Place::R, Step::identity);
  return assume<with(L, A, Place::R)>(
      raw::move(x.local(), A, Place::I, Place::R, Along{0}, "enter"));
}

}  // namespace moesh
