#include "moesh/optim/grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "moesh/kernels/update.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"

namespace moesh::optim {
namespace {

using enum Place;

}  // namespace

Norm grad_norm(const ParamList& params) {
  const at::NoGradGuard no_grad;
  const auto gradients = params.gradients();
  std::vector<at::Tensor> own, others;  // what this rank counts, and what another does
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (gradients[i].numel() == 0) continue;
    (is_first_holder(*params[i].stored) ? own : others).push_back(gradients[i]);
  }
  const at::Device device = params.device();
  at::Tensor mine = kernels::sum_of_squares(own, device);
  // 0 times inf or NaN is NaN, which all must see.
  if (!others.empty()) mine = mine + kernels::sum_of_squares(others, device) * 0.0;
  const auto stage = all_reduce<kTokenAxes, I>(assume<Dense{P, P, P}>(mine));
  return sqrt(sum_over_stages(stage));
}

bool all_finite(const Norm& norm) { return std::isfinite(number(norm)); }
bool all_finite(const ParamList& params) { return all_finite(grad_norm(params)); }

}  // namespace moesh::optim
