#include "moesh/optim/params.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "moesh/base/error.h"
#include "moesh/kernels/update.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/tensor.h"
#include "moesh/spmd/transitions.h"

namespace moesh::optim {

void ParamList::add(Stored& w, Decay decay) {
  const auto& name = w.spec.name;
  MOESH_CHECK(w.value.defined(), ErrorKind::config,
              "a parameter without a value is added to the list; construct it first");
  device_ = w.value.device();
  if (!w.spec.trained) return;
  MOESH_CHECK(
      w.spec.dtype == wide_dtype(w.spec.dtype), ErrorKind::config, "parameter '", name, "' has ",
      w.value.dtype().name(),
      " master weights; small updates would round to nothing. Use float32 or float64, and set .compute to the type of the work");
  MOESH_CHECK(names_.insert(name).second, ErrorKind::config, "two parameters are called '", name,
              "': each has a name of its own, and is added once");
  entries_.push_back({&w, decay});
}

std::vector<at::Tensor> ParamList::gradients() const {
  std::vector<at::Tensor> all;
  all.reserve(entries_.size());
  for (const auto& entry : entries_) {
    const at::Tensor& gradient = entry.stored->value.grad();
    MOESH_CHECK(
        gradient.defined(), ErrorKind::config, "parameter '", entry.stored->spec.name,
        "' has no gradient: no backward has reached it since the last step. A parameter that is "
        "not trained is frozen (training.freeze)");
    all.push_back(gradient);
  }
  return all;
}

at::Device ParamList::device() const {
  MOESH_CHECK(device_, ErrorKind::config, "an empty list of parameters; add(w) some");
  return *device_;
}

void ParamList::zero_grad() const {
  for (const auto& entry : entries_) entry.stored->value.mutable_grad().reset();
}

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
