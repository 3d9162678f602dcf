#pragma once
// Ranks hold a sequence in ranges of positions. This gives each rank the rows that its tokens look
// at (keys and values): its own, and copies of rows of other ranks.

#include <vector>

#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"
#include "moesh/spmd/transitions.h"
#include "moesh/types/token.h"

namespace moesh {

/// Which positions the ranks of a group hold, of tensors whose dimension `dim` is the sequence, and
/// which they ask for. Every position is held by one rank.
struct RangesOfRanks {
  std::int64_t dim;
  std::vector<PositionRanges> held, asked;
};

namespace raw {
/// These positions of a tensor whose dimension `dim` is the whole sequence, in this order.
at::Tensor rows_at(const at::Tensor& x, std::int64_t dim, const PositionRanges& ranges);
/// The way back, where the ranges are all there is: what lies in their order, by its positions.
at::Tensor by_position(const at::Tensor& x, std::int64_t dim, const PositionRanges& ranges);

MaybeAdjointPair gather_ranges(Axes axes, const RangesOfRanks& ranges);
template <Axes A, auto L>
constexpr bool has_own_tokens() {
  if (on(L, A) != Place::T)
    throw "gather_ranges takes a rank's own tokens (T): a value that every rank has whole needs none";
  return true;
}
}  // namespace raw

/// Rank r gets the rows of x at the positions asked[r], in their order: its own rows, if it asks
/// for any, and those of others. Only requested rows are sent: in an all_gather if all ranks ask
/// for the whole, else straight to the rank that asks. Backward: the gradients of copies go back to
/// the owner of the row, which adds them up. The result is T, since each rank does its own work
/// with it. But it is not a list of tokens: rows lie on several ranks, and a sum over tokens would
/// count copies.
template <Axes A, auto L>
Tensor<L> gather_ranges(const Tensor<L>& x, const RangesOfRanks& ranges) {
  static_assert(raw::has_own_tokens<A, L>());
  return raw::typed_results<Tensor<L>>(raw::run_pair({x.local()}, raw::gather_ranges(A, ranges)));
}
template <Axes A, auto L>
auto start_gather_ranges(const Tensor<L>& x, const RangesOfRanks& ranges) {
  static_assert(raw::has_own_tokens<A, L>());
  return Moving<Tensor<L>>(raw::StartedStep({x.local()}, raw::gather_ranges(A, ranges)));
}

}  // namespace moesh
