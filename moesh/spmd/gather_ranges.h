#pragma once
// Ranks hold a sequence in pieces. This gives each rank the rows that its tokens look at (keys and
// values): its own piece, and copies of rows of other ranks.

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

/// Rank r gets the rows ranges[r] of x, where the pieces of all ranks side by side are the whole:
/// its own rows, if it has any, and those of others. Only requested rows are sent: in an all_gather
/// if all ranks ask for the whole, else straight to the rank that asks. Backward: the gradients of
/// copies go back to the owner of the row, which adds them up. The result is T, since each rank
/// does its own work with it. But it is not a list of tokens: rows lie on several ranks, and a sum
/// over tokens would count copies.
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
