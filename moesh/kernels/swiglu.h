#pragma once
// h = silu(gate) up of a dense MLP, in float32 or wider and rounded once.

#include <ATen/core/Tensor.h>

namespace moesh::kernels {

/// Both of one shape and dtype.
at::Tensor swiglu_forward(const at::Tensor& gate, const at::Tensor& up);

struct SwigluGradients {
  at::Tensor gate, up;
};
SwigluGradients swiglu_backward(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& dh);

}  // namespace moesh::kernels
