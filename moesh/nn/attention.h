#pragma once
// Softmax attention of the heads that a tp rank holds. Queries are the tokens of this cp rank, keys
// and values those that they see, also of other cp ranks. B batch, L tokens of this cp rank, S
// tokens that they see, h heads of this tp rank, d width of a head

#include <functional>
#include <vector>

#include "moesh/nn/residual.h"
#include "moesh/nn/tokens.h"
#include "moesh/spmd/param.h"
#include "moesh/spmd/reach.h"
#include "moesh/spmd/tensor.h"

namespace moesh::nn {

using Heads = Tensor<Dense{Place::T, Place::T, Place::F}>;    // [B, L, h, d]: own positions
using PerHead = Tensor<Dense{Place::R, Place::R, Place::F}>;  // [h]: a number of each own head

/// [B, L, h * width] -> [B, L, h, width], and back.
Heads split_heads(const Tensor<Dense{Place::T, Place::T, Place::F}>& x, std::int64_t width);
Tensor<Dense{Place::T, Place::T, Place::F}> merge_heads(const Heads& x);

/// A query sees itself and what is before it, as far as the window and its chunk reach.
struct AttentionOptions {
  double scale = 1;
  std::int64_t window = 0;  // tokens that a query sees, itself among them; 0: all
  // The sequence is cut into chunks of this many tokens, and a query sees its own; 0: one chunk.
  std::int64_t chunk = 0;
};

/// For each cp rank, the positions that its queries see, its own among them: up to the end of its
/// span, and from a multiple of the chunk. Without a window or chunk all ranks see the whole.
std::vector<Reach> reaches(const Tokens& tokens, const AttentionOptions& options);

/// [B, L, ..] of this cp rank's tokens -> [B, S, ..] of those that its queries see (`reaches`):
/// only these travel. Keys and values may be made before or after, whichever is smaller on its way.
Heads seen_positions(const Heads& x, const Tokens& tokens, const AttentionOptions& options);
Full seen_positions(const Full& x, const Tokens& tokens, const AttentionOptions& options);

/// How many keys a query sees, on average over a sequence.
double mean_visible(std::int64_t sequence, const AttentionOptions& options);

/// Causal attention, [B, L, h, d of v]; k and v are of seen_positions with the same options. h may
/// be smaller for them (grouped queries).
Heads attend(const Heads& q, const Heads& k, const Heads& v, const Tokens& tokens,
             const AttentionOptions& options);
/// The same with a sink in each head: softmax over [scores, sink], and the last is dropped.
Heads attend(const Heads& q, const Heads& k, const Heads& v, const PerHead& sinks,
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
