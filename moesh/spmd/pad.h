#pragma once
#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

/// T, F or E -> P: full size, zero outside of this rank's slice; backward: keep the slice.
template <Axes A, auto L>
auto pad(const Tensor<L>& x, const Along& along) {
  [[maybe_unused]] constexpr auto steps = transition(L, A, Place::P, Step::pad);
  return assume<with(L, A, Place::P)>(raw::move(x.local(), A, on(L, A), Place::P, along, "pad"));
}

}  // namespace moesh
