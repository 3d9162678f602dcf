#pragma once
// Rows of a sequence which the ranks hold in pieces, and copies of those around them: what a rank's
// tokens look at (keys and values).

#include <vector>

#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"
#include "moesh/spmd/transitions.h"

namespace moesh {

/// Positions [begin, end) of the whole.
struct PositionRange {
  std::int64_t begin, end;
  bool operator==(const PositionRange&) const = default;
};

namespace raw {
MaybeAdjointPair gather_ranges(Axes axes, const SplitDim& along,
                               const std::vector<PositionRange>& ranges);
template <Axes A, auto L>
constexpr bool has_own_tokens() {
  if (on(L, A) != Place::T)
    throw "gather_ranges takes a rank's own tokens (T): a value that every rank has whole needs none";
  return true;
}
}  // namespace raw

/// Rank r gets the rows ranges[r] of x, whose pieces side by side are the whole: its own, if it
/// has any, and those of others. Only what is asked for travels: where all ranks ask for the whole,
/// in an all_gather, else straight to the rank that asks. Backward: the gradients of copies go back
/// to the owner of the row, which adds them up. The result is T, each rank does its own work with
/// it; but rows lie on several ranks, so it is not a list of tokens: a sum over tokens would
/// count copies.
template <Axes A, auto L>
Tensor<L> gather_ranges(const Tensor<L>& x, const SplitDim& along,
                        const std::vector<PositionRange>& ranges) {
  static_assert(raw::has_own_tokens<A, L>());
  return raw::typed_results<Tensor<L>>(
      raw::run_pair({x.local()}, raw::gather_ranges(A, along, ranges)));
}
template <Axes A, auto L>
auto start_gather_ranges(const Tensor<L>& x, const SplitDim& along,
                         const std::vector<PositionRange>& ranges) {
  static_assert(raw::has_own_tokens<A, L>());
  return Moving<Tensor<L>>(raw::StartedStep({x.local()}, raw::gather_ranges(A, along, ranges)));
}

}  // namespace moesh
