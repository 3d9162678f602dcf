#pragma once
// The attention kernel, differentiable.

#include "moesh/kernels/attention.h"

namespace moesh::nn {

/// [B, L, h, v]. Keeps its input and one number for each query, nothing of size [L, S].
at::Tensor fused_attention(const kernels::AttentionConfig& config,
                           const kernels::AttentionInput& input);

}  // namespace moesh::nn
