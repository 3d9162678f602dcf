#pragma once
// QK-clip (Kimi K2): where a step had a logit of attention above a threshold tau, the weights that
// make queries and keys of the head are scaled, so that it would have been tau. h heads of this tp
// rank

#include <ATen/core/Tensor.h>

#include <vector>

#include "moesh/nn/attention.h"

namespace moesh::nn {

/// After the update of a step: for each head whose largest logit s of the step, over all tokens of
/// all ranks, is above tau, the rows of Attention::logit_rows are multiplied by a power of tau / s.
/// Where the scalar `skip` is not 0 they stay. Largest logits begin anew. Every rank calls it with
/// its own layers, of which its stage has at least one. Returns the largest of all logits, of all
/// heads, layers and stages: a scalar.
at::Tensor clip_logits(const std::vector<Attention*>& layers, double tau, const at::Tensor& skip);

// Its parts.

/// The largest logit of each own head of each layer, of all tokens of all ranks.
at::Tensor largest_logits(const std::vector<Attention*>& layers);
/// Scales the rows of one layer, whose heads had these.
void clip_logits(Attention& layer, const at::Tensor& largest_h, double tau, const at::Tensor& skip);

}  // namespace moesh::nn
