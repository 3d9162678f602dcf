#pragma once
// The residual stream between blocks: T on tp with sequence parallelism, I without. The inside of
// attention, MLP and MoE is the same in both: R in, P out.

#include "moesh/nn/norm.h"
#include "moesh/nn/tokens.h"
#include "moesh/spmd/all_gather.h"
#include "moesh/spmd/all_reduce.h"
#include "moesh/spmd/enter.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/reduce_scatter.h"

namespace moesh::nn {

using Full = Tensor<Dense{Place::T, Place::T,
                          Place::R}>;  // all tokens of this cp rank, to be worked on in slices
using Sum = Tensor<Dense{Place::T, Place::T, Place::P}>;  // what comes out of that

template <bool Sp>
using Stream = Tensor<Dense{Place::T, Place::T, Sp ? Place::T : Place::I}>;

/// What normed(x) is to the tp ranks: each token is normalised once with sequence parallelism, and
/// by all of them without.
template <bool Sp>
Stream<Sp> norm(const RmsNorm& n, const Stream<Sp>& x) {
  if constexpr (Sp)
    return n(x);
  else
    return n.invariant(x);
}

/// T -> R or I -> R: every tp rank sees all tokens of its cp rank.
template <bool Sp>
Full to_full(const Stream<Sp>& x, const Tokens& tokens) {
  if constexpr (Sp)
    return all_gather<tp>(x, tokens.over_tp());
  else
    return enter<tp>(x);
}

/// P -> T or P -> I: back to the stream.
template <bool Sp>
Stream<Sp> to_stream(const Sum& y, const Tokens& tokens) {
  if constexpr (Sp)
    return reduce_scatter<tp>(y, tokens.over_tp());
  else
    return all_reduce<tp, Place::I>(y);
}

}  // namespace moesh::nn
