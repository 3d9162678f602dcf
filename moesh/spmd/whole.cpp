#include "moesh/spmd/whole.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "moesh/base/error.h"

namespace moesh::raw {

double number(const at::Tensor& x) {
  MOESH_CHECK(x.numel() == 1, ErrorKind::config, "a number is read from a tensor with ", x.numel(),
              " elements; sum it first");
  return x.item<double>();
}

double clip(const std::vector<at::Tensor>& gradients, const at::Tensor& norm, double max_norm) {
  MOESH_CHECK(max_norm > 0, ErrorKind::config, "the gradient norm is clipped at ", max_norm,
              "; it takes a positive number");
  const double n = number(norm);
  MOESH_CHECK(std::isfinite(n) && n >= 0, ErrorKind::data, "the gradient norm is ", n,
              "; skip this step instead of clipping it");
  const double factor = std::min(1.0, max_norm / std::max(n, 1e-300));
  const at::NoGradGuard no_grad;
  if (factor < 1)
    for (const auto& g : gradients) at::Tensor(g).mul_(factor);
  return factor;
}

}  // namespace moesh::raw
