#pragma once
// Attention with a window or with sinks on an accelerator, by LibTorch's FlashAttention-2: no mask,
// and key heads are not repeated.

#include "moesh/kernels/attention.h"

namespace moesh::nn {

/// Whether it takes them: compute capability 8.0 or more, bfloat16, heads of one width, queries that
/// end where the keys end, no chunks. What has neither window nor sinks is left to faster kernels.
bool takes_flash_attention(const kernels::AttentionConfig& config,
                           const kernels::AttentionInput& input);

/// [B, L, h, v], differentiable. Keeps its input, its result and one number for each query.
at::Tensor flash_attention(const kernels::AttentionConfig& config,
                           const kernels::AttentionInput& input);

}  // namespace moesh::nn
