#pragma once
// Attention from LibTorch's own operations, for devices without a kernel of ours.

#include "moesh/kernels/attention.h"

namespace moesh::nn {

/// [B, L, h, v], by scaled_dot_product_attention; a mask [L, S] is made where the queries do not
/// see all that is before them, and one of each sequence where it has documents.
at::Tensor composed_attention(const kernels::AttentionConfig& config,
                              const kernels::AttentionInput& input);

/// bool [L, S], or [B, 1, L, S] with documents: which of the keys each query sees.
at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys,
                        const kernels::AttentionConfig& config, const at::Tensor& starts_BL,
                        at::Device device);

}  // namespace moesh::nn
