#pragma once
// RMSNorm of rows: y = r x w with r = 1 / sqrt(mean(x^2) + eps), in float32 or wider and rounded
// once. D features of a row

#include <ATen/core/Tensor.h>

namespace moesh::kernels {

struct NormOutput {
  at::Tensor y;  // shape and dtype of x
  at::Tensor r;  // one number for each row, all that backward needs besides the input; float32
                 // (float64 with float64)
};

/// x is [.., D]; weight_D is float32 (float64 with float64), or undefined: no weight.
NormOutput norm_forward(const at::Tensor& x, const at::Tensor& weight_D, double eps);

struct NormGradients {
  at::Tensor x, weight_D;  // weight_D is undefined where there is none
};
NormGradients norm_backward(const at::Tensor& x, const at::Tensor& weight_D, const at::Tensor& r,
                            const at::Tensor& dy);

}  // namespace moesh::kernels
