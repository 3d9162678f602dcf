#pragma once
// The choice of experts: the logits of the router, a product with few columns in the precision of
// the gate, and the best of each token's scores. T tokens, D model, E experts, K top-k

#include <ATen/core/Tensor.h>

namespace moesh::kernels {

/// x gate' in the dtype of the gate (float32 or float64); x is of that dtype or bfloat16. Own
/// kernels (bfloat16 on compute capability 9.0) make nothing of size [T, D] on the way.
at::Tensor gate_forward(const at::Tensor& x_TD, const at::Tensor& gate_ED);

struct GateGradients {
  at::Tensor x_TD;  // dtype of x
  at::Tensor gate_ED;
};
GateGradients gate_backward(const at::Tensor& x_TD, const at::Tensor& gate_ED,
                            const at::Tensor& d_logits_TE);

struct TopK {
  at::Tensor values_TK;   // descending, dtype of the scores
  at::Tensor experts_TK;  // int64
};

/// The K largest of each token's scores [T, E] (float32 or float64), largest first. Among equal
/// scores the lowest expert wins, on every device. A NaN is an Error(data) that names its token;
/// own kernels of an accelerator, for which the host does not wait, choose it first, so that it
/// reaches the loss. -inf is a legal score (a masked expert).
TopK top_k(const at::Tensor& scores_TE, std::int64_t k);

}  // namespace moesh::kernels
