#include "moesh/optim/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "moesh/base/error.h"

namespace moesh::optim {

Optimizer::Optimizer(ParamList params, std::vector<std::string> state_names)
    : params_(std::move(params)), state_names_(std::move(state_names)) {
  MOESH_CHECK(params_.size() > 0, ErrorKind::config,
              "an optimizer with an empty list of parameters; add(w) some");
  for (const auto& entry : params_) {
    auto& state = state_.emplace_back();
    for (std::size_t s = 0; s < state_names_.size(); ++s)
      state.push_back(at::zeros_like(entry.stored->value.detach()));
  }
}

void Optimizer::step(double lr) {
  MOESH_CHECK(std::isfinite(lr) && lr >= 0, ErrorKind::config, "a step with learning rate ", lr,
              "; it takes a number from 0 on");
  const at::NoGradGuard no_grad;
  const auto gradients = params_.gradients();
  std::vector<Moving> moving;
  for (std::size_t i = 0; i < params_.size(); ++i)
    if (const auto& value = params_[i].stored->value; value.numel() > 0)
      moving.push_back({value.detach(), gradients[i].contiguous(), state_[i], params_[i].group});
  update(moving, lr, num_steps_ + 1);
  ++num_steps_;
  zero_grad();
}

std::vector<Optimizer::State> Optimizer::state() const {
  std::vector<State> all;
  for (std::size_t i = 0; i < params_.size(); ++i)
    for (std::size_t s = 0; s < state_names_.size(); ++s)
      all.push_back(
          {params_[i].stored->spec.name + "." + state_names_[s], params_[i].stored, state_[i][s]});
  return all;
}

void Optimizer::set_num_steps(std::int64_t n) {
  MOESH_CHECK(n >= 0, ErrorKind::data, "an optimizer that has taken ", n,
              " steps; it takes a number from 0 on");
  num_steps_ = n;
}

}  // namespace moesh::optim
