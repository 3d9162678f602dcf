#include "moesh/spmd/whole.h"

#include <ATen/core/grad_mode.h>

#include "moesh/base/error.h"

namespace moesh::raw {

double number(const at::Tensor& x) {
  MOESH_CHECK(x.numel() == 1, ErrorKind::config, "a number is read from a tensor with ", x.numel(),
              " elements; sum it first");
  return x.item<double>();
}

at::Tensor clip_factor(const at::Tensor& norm, double max_norm) {
  MOESH_CHECK(max_norm > 0, ErrorKind::config, "the gradient norm is clipped at ", max_norm,
              "; it takes a positive number");
  const at::NoGradGuard no_grad;
  return norm.clamp_min(1e-300).reciprocal().mul_(max_norm).clamp_max_(1);
}

}  // namespace moesh::raw
