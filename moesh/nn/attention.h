#pragma once
// Softmax attention of the heads that a tp rank holds. Queries are the tokens of this cp rank, keys
// and values those of all. B batch, L tokens of this cp rank, S all tokens, h heads of this tp
// rank, d width of a head

#include <functional>

#include "moesh/nn/residual.h"
#include "moesh/nn/tokens.h"
#include "moesh/spmd/param.h"
#include "moesh/spmd/tensor.h"

namespace moesh::nn {

using Heads = Tensor<Dense{Place::T, Place::T, Place::F}>;     // [B, L, h, d]: own positions
using AllHeads = Tensor<Dense{Place::T, Place::R, Place::F}>;  // [B, S, h, d]: all positions
using PerHead = Tensor<Dense{Place::R, Place::R, Place::F}>;   // [h]: a number of each own head

/// [B, L, h * width] -> [B, L, h, width], and back.
Heads split_heads(const Tensor<Dense{Place::T, Place::T, Place::F}>& x, std::int64_t width);
Tensor<Dense{Place::T, Place::T, Place::F}> merge_heads(const Heads& x);

/// Keys or values of all cp ranks. T -> R on cp; backward: reduce_scatter.
AllHeads all_positions(const Heads& x, const Tokens& tokens);

/// A query sees itself and what is before it, as far as the window and its chunk reach.
struct AttentionOptions {
  double scale = 1;
  std::int64_t window = 0;  // tokens that a query sees, itself among them; 0: all
  // The sequence is cut into chunks of this many tokens, and a query sees its own; 0: one chunk.
  std::int64_t chunk = 0;
};

/// How many keys a query sees, on average over a sequence.
double mean_visible(std::int64_t sequence, const AttentionOptions& options);

/// Causal attention, [B, L, h, d of v]. h may be smaller for keys and values (grouped queries).
Heads attend(const Heads& q, const AllHeads& k, const AllHeads& v, const Tokens& tokens,
             const AttentionOptions& options);
/// The same with a sink in each head: softmax over [scores, sink], and the last is dropped.
Heads attend(const Heads& q, const AllHeads& k, const AllHeads& v, const PerHead& sinks,
             const Tokens& tokens, const AttentionOptions& options);

/// What a decoder's block needs of its attention, whatever the kind.
class Attention {
 public:
  virtual ~Attention() = default;
  virtual Sum operator()(const Full& x_BLD, const Tokens& tokens) const = 0;
  /// Every parameter, in forward order.
  virtual void each_param(const std::function<void(Stored&)>& f) = 0;
  /// FLOPs of scores and values per token, forward and backward, at this sequence length.
  virtual double flops(std::int64_t sequence) const = 0;
};

}  // namespace moesh::nn
