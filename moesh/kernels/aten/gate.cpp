// The logits of the router with LibTorch ops, in the precision of the gate.
#include "moesh/kernels/gate.h"

#include <ATen/ops/mm.h>

namespace moesh::kernels::aten {

at::Tensor gate_forward(const at::Tensor& x_TD, const at::Tensor& gate_ED) {
  return at::mm(x_TD.to(gate_ED.scalar_type()), gate_ED.t());
}

GateGradients gate_backward(const at::Tensor& x_TD, const at::Tensor& gate_ED,
                            const at::Tensor& d_logits_TE) {
  return {at::mm(d_logits_TE, gate_ED).to(x_TD.scalar_type()),
          at::mm(d_logits_TE.t(), x_TD.to(gate_ED.scalar_type()))};
}

}  // namespace moesh::kernels::aten
