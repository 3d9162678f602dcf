#pragma once
// The residual stream between blocks: T on tp with sequence parallelism, I without. The inside of
// attention, MLP and MoE is the same in both: R in, P out.

#include "moesh/nn/norm.h"
#include "moesh/nn/tokens.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"

namespace moesh::nn {

// All tokens of this cp rank as the input of work that is split, and the result of that work.
using Full = Tensor<Dense{Place::T, Place::T, Place::R}>;
using Sum = Tensor<Dense{Place::T, Place::T, Place::P}>;

template <bool Sp>
using Stream = Tensor<Dense{Place::T, Place::T, Sp ? Place::T : Place::I}>;

/// The layout of normed(x) on tp: each token is normalised once with sequence parallelism, and
/// by all of them without.
template <bool Sp>
Stream<Sp> norm(const RmsNorm& n, const Stream<Sp>& x) {
  if constexpr (Sp)
    return n(x);
  else
    return n.invariant(x);
}

/// The same, and x itself, to add to later (rms_norm_beside).
template <bool Sp>
std::pair<Stream<Sp>, Stream<Sp>> norm_beside(const RmsNorm& n, const Stream<Sp>& x) {
  return n.beside<!Sp>(x);
}

/// T -> R or I -> R: every tp rank sees all tokens of its cp rank, which tp cuts as `over_tp` says.
template <bool Sp>
Full to_full(const Stream<Sp>& x, [[maybe_unused]] const SplitDim& over_tp) {
  if constexpr (Sp)
    return all_gather<tp>(x, over_tp);
  else
    return enter<tp>(x);
}

/// P -> T or P -> I: back to the stream.
template <bool Sp>
Stream<Sp> to_stream(const Sum& y, [[maybe_unused]] const SplitDim& over_tp) {
  if constexpr (Sp)
    return reduce_scatter<tp>(y, over_tp);
  else
    return all_reduce<tp, Place::I>(y);
}

/// The gradients of shards come back by the codec.
template <bool Sp>
auto start_to_stream(const Sum& y, [[maybe_unused]] const SplitDim& over_tp,
                     [[maybe_unused]] const Codec& back) {
  if constexpr (Sp)
    return start_reduce_scatter<tp>(y, over_tp, back);
  else
    return start_all_reduce<tp, Place::I>(y);
}

/// The stream as it is, or I -> T: each tp rank takes its own tokens.
template <bool Sp>
PerToken own_tokens(const Stream<Sp>& x, [[maybe_unused]] const SplitDim& over_tp) {
  if constexpr (Sp)
    return x;
  else
    return keep<tp>(x, over_tp);
}

}  // namespace moesh::nn
