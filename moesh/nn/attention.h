#pragma once
// Softmax attention of the heads that a tp rank holds. Queries are the tokens of this cp rank, keys and values those of all.
// B batch, L tokens of this cp rank, S all tokens, h heads of this tp rank, d width of a head

#include "moesh/nn/tokens.h"
#include "moesh/spmd/tensor.h"

namespace moesh::nn {

using Heads = Tensor<Dense{Place::T, Place::T, Place::F}>;     // [B, L, h, d]: own heads, own positions
using AllHeads = Tensor<Dense{Place::T, Place::R, Place::F}>;  // [B, S, h, d]: own heads, all positions

struct AttentionOptions {
  double scale = 1;
};

/// Keys or values of all cp ranks. T -> R on cp; backward: reduce_scatter.
AllHeads all_positions(const Heads& x, const Tokens& tokens);

/// Causal attention, [B, L, h, d of v]. h may be smaller for keys and values (grouped queries).
Heads attend(const Heads& q, const AllHeads& k, const AllHeads& v, const Tokens& tokens, const AttentionOptions& options);

}  // namespace moesh::nn
