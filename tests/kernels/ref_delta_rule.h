#pragma once
// The gated delta rule and its convolution, written from their formulas: one token after the other,
// one head at a time. Slow and obvious; no code is common to it and the fast path. Only plain ATen
// ops are used, so that gradients come from LibTorch's autograd. Meant for float64.

#include <ATen/core/Tensor.h>

#include "moesh/kernels/attention.h"

namespace moesh::kernels::ref {

DeltaRuleOutput delta_rule(const DeltaRuleInput& input);

/// x is [B, L, g, c], w [g, c, K].
at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const at::Tensor& starts_BL);

}  // namespace moesh::kernels::ref
