#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>

#include "moesh/kernels/table.h"

namespace moesh::kernels::aten {
namespace {

at::ScalarType wide(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace

at::Tensor swiglu_forward(const at::Tensor& gate, const at::Tensor& up) {
  return at::silu(gate.to(wide(gate))).mul_(up).to(gate.scalar_type());
}

SwigluGradients swiglu_backward(const at::Tensor& gate, const at::Tensor& up,
                                const at::Tensor& dh) {
  const at::Tensor g = gate.to(wide(gate)), d = dh.to(wide(gate)), sigma = at::sigmoid(g);
  const at::Tensor slope = sigma * (1 + g * (1 - sigma));  // of silu
  return {(d * up * slope).to(gate.scalar_type()), (d * g).mul_(sigma).to(gate.scalar_type())};
}

}  // namespace moesh::kernels::aten
