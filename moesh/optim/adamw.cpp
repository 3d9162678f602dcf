#include "moesh/optim/adamw.h"

#include <cmath>

#include "moesh/base/error.h"
#include "moesh/kernels/update.h"

namespace moesh::optim {

void AdamWConfig::validate() const {
  const auto is_beta = [](double b) { return b >= 0 && b < 1; };
  MOESH_CHECK(is_beta(beta1), ErrorKind::config, "AdamW: beta1 is ", beta1,
              "; it takes 0 or more and less than 1, such as 0.9");
  MOESH_CHECK(is_beta(beta2), ErrorKind::config, "AdamW: beta2 is ", beta2,
              "; it takes 0 or more and less than 1, such as 0.95");
  MOESH_CHECK(std::isfinite(eps) && eps > 0, ErrorKind::config, "AdamW: eps is ", eps,
              "; it takes a positive number, such as 1e-8");
  MOESH_CHECK(std::isfinite(weight_decay) && weight_decay >= 0, ErrorKind::config,
              "AdamW: weight_decay is ", weight_decay, "; it takes 0 or more, such as 0.1");
}

AdamW::AdamW(const AdamWConfig& config) : config_(config) { config_.validate(); }

std::vector<StateSpec> AdamW::state(const Stored& /*w*/) const {
  return {{.name = "exp_avg"}, {.name = "exp_avg_sq"}};
}

void AdamW::update(const std::vector<Moving>& params, const RuleStep& step) const {
  std::vector<kernels::AdamWParam> all;
  for (const auto& p : params)
    all.push_back({.value = p.value,
                   .gradient = p.gradient,
                   .mean = p.state[0],
                   .mean_square = p.state[1],
                   .copy = raw::current_copy(*p.stored),
                   .weight_decay = p.decay == Decay::on ? config_.weight_decay : 0});
  kernels::adamw_(
      {.beta1 = config_.beta1, .beta2 = config_.beta2, .eps = config_.eps, .step = step.numbers},
      all);
  for (const auto& p : params) raw::note_copy_written(*p.stored);
}

}  // namespace moesh::optim
