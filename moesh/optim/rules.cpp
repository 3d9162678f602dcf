#include "moesh/optim/rules.h"

#include <cmath>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/kernels/update.h"

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
void Sgd::update(const std::vector<ParamInStep>& params, const RuleStep& step) const {
  for (const auto& p : params) {
    at::Tensor direction = step.clipped(p);
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

void AdamW::update(const std::vector<ParamInStep>& params, const RuleStep& step) const {
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

namespace {

using RulePtr = std::shared_ptr<const Rule>;

RulePtr make_adamw(const RuleValues& v) {
  return std::make_shared<AdamW>(AdamWConfig{.beta1 = v.at("beta1"),
                                             .beta2 = v.at("beta2"),
                                             .eps = v.at("eps"),
                                             .weight_decay = v.at("weight_decay")});
}

RulePtr make_sgd(const RuleValues& v) {
  return std::make_shared<Sgd>(
      SgdConfig{.momentum = v.at("momentum"), .weight_decay = v.at("weight_decay")});
}

RulePtr make_muon(const RuleValues& v) {
  return std::make_shared<Muon>(
      MuonConfig{.momentum = v.at("muon_momentum"),
                 .nesterov = v.at("nesterov") != 0,
                 .weight_decay = v.at("weight_decay"),
                 .newton_schulz = v.at("muon_float32") != 0 ? at::kFloat : at::kBFloat16,
                 .by_head = v.at("muon_by_head") != 0});
}

}  // namespace

const std::vector<RuleKind>& rule_kinds() {
  static const std::vector<RuleKind> all{
      {"adamw", {"beta1", "beta2", "eps", "weight_decay"}, make_adamw},
      {"sgd", {"momentum", "weight_decay"}, make_sgd},
      {"muon",
       {"muon_momentum", "nesterov", "muon_float32", "muon_by_head", "weight_decay"},
       make_muon,
       is_for_muon,
       "adamw"}};
  return all;
}

std::vector<std::string> rule_names() {
  std::vector<std::string> names;
  for (const auto& kind : rule_kinds()) names.push_back(kind.name);
  return names;
}

const RuleKind& find_rule(const std::string& name) {
  for (const auto& kind : rule_kinds())
    if (kind.name == name) return kind;
  throw Error(ErrorKind::config, detail::concat("no update rule is called '", name, "'; use ",
                                                joined_by_or(rule_names())));
}

}  // namespace moesh::optim
