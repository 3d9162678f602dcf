#include "moesh/optim/sgd.h"

#include <cmath>

#include "moesh/base/error.h"

namespace moesh::optim {

void SgdConfig::validate() const {
  MOESH_CHECK(momentum >= 0 && momentum < 1, ErrorKind::config, "SGD: momentum is ", momentum,
              "; it takes 0 (none) or more and less than 1, such as 0.9");
  MOESH_CHECK(std::isfinite(weight_decay) && weight_decay >= 0, ErrorKind::config,
              "SGD: weight_decay is ", weight_decay, "; it takes 0 or more, such as 1e-4");
}

Sgd::Sgd(const SgdConfig& config) : config_(config) { config_.validate(); }

std::vector<StateSpec> Sgd::state(const Stored& /*w*/) const {
  if (config_.momentum == 0) return {};
  return {{.name = "momentum_buffer"}};
}

// Products are rounded before they are added: add(x, alpha) is a fused multiply-add in ATen's
// vector loop and not in its remainder, so the bits would depend on where a shard begins.
void Sgd::update(const std::vector<Moving>& params, const RuleStep& step) const {
  for (const auto& p : params) {
    at::Tensor direction = step.clipped(p.gradient);
    if (p.decay == Decay::on && config_.weight_decay > 0)
      direction = direction.add(p.value.mul(config_.weight_decay));
    if (config_.momentum > 0) {
      direction = p.state[0].mul(config_.momentum).add_(direction);
      step.write(p.state[0], direction);
    }
    step.write(p.value, p.value.sub(direction.mul(step.lr())));
    // Here, so that a CUDA graph makes it anew in every replay, after the update.
    moesh::raw::current_copy(*p.stored);
  }
}

}  // namespace moesh::optim
