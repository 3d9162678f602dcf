#pragma once
// Attention as functions of queries, keys and values, differentiable: the own kernel, LibTorch's
// operations, and LibTorch's FlashAttention-2.

#include "moesh/kernels/attention.h"

namespace moesh::nn {

// ---- the own kernel ----

/// [B, L, h, v]. Keeps its input and one number for each query, nothing of size [L, S].
at::Tensor fused_attention(const kernels::AttentionConfig& config,
                           const kernels::AttentionInput& input);

// ---- LibTorch's own operations, for devices without a kernel of ours ----

/// [B, L, h, v], by scaled_dot_product_attention; a mask [L, S] is made where the queries do not
/// see all that is before them, and one of each sequence where it has documents.
at::Tensor composed_attention(const kernels::AttentionConfig& config,
                              const kernels::AttentionInput& input);

/// bool [L, S], or [B, 1, L, S] with documents: which of the keys each query sees.
at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys,
                        const kernels::AttentionConfig& config, const at::Tensor& starts_BL,
                        at::Device device);

// ---- LibTorch's FlashAttention-2, or cuDNN's kernel where sinks are all there is ----
// For a window, sinks, documents, or queries behind the first keys, on an accelerator: no mask, and
// key heads are not repeated.

/// Whether it takes them: compute capability 8.0 or more, bfloat16, values no wider than keys,
/// queries that end where the keys end (in documents: any), no chunks. What has none of these is
/// left to faster kernels.
bool takes_flash_attention(const kernels::AttentionConfig& config,
                           const kernels::AttentionInput& input);

/// Documents as the kernel's sequences of different lengths, one behind the other: the first query
/// and key of each among those of the whole batch, and the ends of the last, int32
/// [most_documents + B + 1] each. A query sees the keys of its document up to its own: the last of
/// both belong together.
struct DocumentBoundaries {
  at::Tensor queries, keys;
};
/// The boundaries of queries whose documents begin at `starts_BL`, and of the keys up to the last
/// query. In each sequence first the keys that none of its queries sees, with no query, then the
/// documents of its queries; entries that are left over are empty, at the end. Nothing is read by
/// the host.
DocumentBoundaries document_boundaries(const kernels::AttentionConfig& config,
                                       const at::Tensor& starts_BL);

/// [B, L, h, v], differentiable. Keeps its input, its result and one number for each query.
at::Tensor flash_attention(const kernels::AttentionConfig& config,
                           const kernels::AttentionInput& input);

}  // namespace moesh::nn
