#pragma once
// In which type a run keeps what must not be rounded to the type of its work.

#include <c10/core/ScalarType.h>

namespace moesh {

/// float64 in float64 runs, float32 in all others: of master weights and the reduction of their
/// gradients, the router, tables of angles, norms and losses.
constexpr at::ScalarType wide_dtype(at::ScalarType run) {
  return run == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace moesh
