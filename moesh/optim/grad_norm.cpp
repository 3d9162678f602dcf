#include "moesh/optim/grad_norm.h"

#include <ATen/core/grad_mode.h>
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

// Squares and sums are in float64. By chunks, so that the wide copies stay in the cache of a CPU
// (one large copy of 8 M elements takes ten times as long), and small beside the model on an
// accelerator.
at::Tensor sum_of_squares(const at::Tensor& x) {
  const std::int64_t chunk = x.is_cpu() ? 1 << 15 : 1 << 24;
  at::Tensor sum = at::zeros({}, x.options().dtype(at::kDouble));
  const at::Tensor flat = x.reshape({-1});
  for (std::int64_t begin = 0; begin < flat.numel(); begin += chunk) {
    const at::Tensor wide =
        flat.narrow(0, begin, std::min(chunk, flat.numel() - begin)).to(at::kDouble);
    sum.add_(wide.mul(wide).sum());
  }
  return sum;
}

}  // namespace

Norm grad_norm(const ParamList& params) {
  MOESH_CHECK(params.size() > 0, ErrorKind::config,
              "the gradient norm of an empty list of parameters; add(w) some");
  const at::NoGradGuard no_grad;
  const auto& mesh = current_mesh();
  const auto gradients = params.gradients();
  at::Tensor mine;
  for (std::size_t i = 0; i < params.size(); ++i) {
    at::Tensor sum = sum_of_squares(gradients[i]);
    if (mesh.coordinate(params[i].stored->replicas) != 0)
      sum.mul_(0.0);  // another rank counts it; 0 times inf or NaN is NaN, which all must see
    mine = mine.defined() ? mine.add_(sum) : sum;
  }
  const auto stage = all_reduce<kTokenAxes, I>(assume<Dense{P, P, P}>(mine));
  return sqrt(sum_over_stages(stage));
}

bool all_finite(const Norm& norm) { return std::isfinite(number(norm)); }
bool all_finite(const ParamList& params) { return all_finite(grad_norm(params)); }

double clip_gradients(const ParamList& params, const Norm& norm, double max_norm) {
  return clip(params.gradients(), norm, max_norm);
}

}  // namespace moesh::optim
