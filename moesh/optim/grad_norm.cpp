#include "moesh/optim/grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "moesh/base/error.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"
#include "moesh/spmd/whole.h"

namespace moesh::optim {
namespace {

using enum Place;

// Squares and sums are in float64. On the CPU by chunks, so that the wide copies stay in its cache
// (one large copy of 8 M elements takes ten times as long).
at::Tensor sum_of_squares(const at::Tensor& x) {
  constexpr std::int64_t kChunk = 1 << 15;
  at::Tensor sum = at::zeros({}, x.options().dtype(at::kDouble));
  const at::Tensor flat = x.reshape({-1});
  for (std::int64_t begin = 0; begin < flat.numel(); begin += kChunk) {
    const at::Tensor wide =
        flat.narrow(0, begin, std::min(kChunk, flat.numel() - begin)).to(at::kDouble);
    sum.add_(wide.mul(wide).sum());
  }
  return sum;
}

// Of all of them together. On an accelerator a few launches read each once and make no copy.
at::Tensor sum_of_squares(const std::vector<at::Tensor>& gradients, at::Device device) {
  const auto wide = at::TensorOptions(device).dtype(at::kDouble);
  if (gradients.empty()) return at::zeros({}, wide);
  if (!device.is_cpu())
    return at::stack(at::_foreach_norm(gradients, 2, at::kDouble)).square_().sum();
  at::Tensor sum = at::zeros({}, wide);
  for (const auto& gradient : gradients) sum.add_(sum_of_squares(gradient));
  return sum;
}

}  // namespace

Norm grad_norm(const ParamList& params) {
  MOESH_CHECK(params.size() > 0, ErrorKind::config,
              "the gradient norm of an empty list of parameters; add(w) some");
  const at::NoGradGuard no_grad;
  const auto& mesh = current_mesh();
  const auto gradients = params.gradients();
  std::vector<at::Tensor> own, others;  // what this rank counts, and what another does
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (gradients[i].numel() == 0) continue;
    const bool is_own = mesh.coordinate(params[i].stored->replicas) == 0;
    (is_own ? own : others).push_back(gradients[i]);
  }
  const at::Device device = gradients[0].device();
  at::Tensor mine = sum_of_squares(own, device);
  // 0 times inf or NaN is NaN, which all must see.
  if (!others.empty()) mine = mine + sum_of_squares(others, device) * 0.0;
  const auto stage = all_reduce<kTokenAxes, I>(assume<Dense{P, P, P}>(mine));
  return sqrt(sum_over_stages(stage));
}

bool all_finite(const Norm& norm) { return std::isfinite(number(norm)); }
bool all_finite(const ParamList& params) { return all_finite(grad_norm(params)); }

double clip_gradients(const ParamList& params, const Norm& norm, double max_norm) {
  return clip(params.gradients(), norm, max_norm);
}

}  // namespace moesh::optim
