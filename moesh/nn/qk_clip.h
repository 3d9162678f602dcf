#pragma once
// QK-clip (Kimi K2): if a step had an attention logit above a threshold tau, the weights that make
// queries and keys of its head are scaled so that it would have been tau. h heads of this tp rank

#include <ATen/core/Tensor.h>

#include <vector>

#include "moesh/nn/attention.h"

namespace moesh::nn {

/// Call it after the update of a step. Let s be the largest logit of a head in the step, over all
/// tokens of all ranks. If s is above tau, the rows of Attention::logit_rows are multiplied by a
/// power of tau / s, unless the scalar `skip` is not 0. Then largest logits begin anew. Every rank
/// calls it with its own layers, at least one. Returns the largest logit of all heads, layers and
/// stages: a scalar.
at::Tensor clip_logits(const std::vector<Attention*>& layers, double tau, const at::Tensor& skip);

// Its parts.

/// The largest logit of each own head of each layer, of all tokens of all ranks.
at::Tensor largest_logits(const std::vector<Attention*>& layers);
/// Scales the rows of one layer, whose heads had these.
void clip_logits(Attention& layer, const at::Tensor& largest_h, double tau, const at::Tensor& skip);

}  // namespace moesh::nn
