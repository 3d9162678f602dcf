#pragma once
// The logits of the router: a product with few columns, in the precision of the gate.
// T tokens, D model, E experts

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

}  // namespace moesh::kernels
