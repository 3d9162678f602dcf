#pragma once
// The choice of experts.
// T tokens, E experts, K top-k

#include <ATen/core/Tensor.h>

namespace moesh::kernels {

struct TopK {
  at::Tensor values_TK;   // descending, dtype of the scores
  at::Tensor experts_TK;  // int64
};

/// The K largest of each token's scores [T, E] (float32 or float64), largest first. Among equal
/// scores the lowest expert wins, on every device. A NaN is an Error(data) that names its token;
/// own kernels of an accelerator, which nobody waits for, choose it first, so that it reaches the
/// loss. -inf is a legal score (a masked expert).
TopK top_k(const at::Tensor& scores_TE, std::int64_t k);

}  // namespace moesh::kernels
