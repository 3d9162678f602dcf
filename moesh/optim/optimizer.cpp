#include "moesh/optim/optimizer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
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

Norm grad_norm(const ParamList& params) {
  using enum Place;
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

namespace {

at::Tensor make_state(const StateSpec& spec, const Stored& w) {
  const auto options = w.value.detach().options().dtype(spec.dtype.value_or(w.spec.dtype));
  return at::zeros(spec.shape.value_or(w.shard.length), options);
}

}  // namespace

Optimizer::Optimizer(ParamList params, RulePtr rule)
    : Optimizer(std::move(params), [rule](const ParamList::Entry&) { return RuleChoice{rule}; }) {}

Optimizer::Optimizer(ParamList params, const ChooseRule& choose)
    : params_(std::move(params)), choose_(choose) {
  for (const auto& entry : params_) {
    const Stored& w = *entry.stored;
    const RuleChoice way = choose(entry);
    const Rule* rule = way.rule.get();
    MOESH_CHECK(rule, ErrorKind::config, "parameter '", w.spec.name, "' has no update rule");
    MOESH_CHECK(std::isfinite(way.lr_scale) && way.lr_scale >= 0, ErrorKind::config, "parameter '",
                w.spec.name, "' has lr_scale ", way.lr_scale, "; it takes 0 or more");
    const auto found = std::find(ways_.begin(), ways_.end(), way);
    ParamState kept{.way = static_cast<std::size_t>(found - ways_.begin()),
                    .specs = rule->state(w)};
    if (found == ways_.end()) ways_.push_back(way);
    for (const auto& spec : kept.specs) {
      MOESH_CHECK(!spec.shape || rule->scope() == RuleScope::parameter, ErrorKind::internal,
                  "a rule that sees elements keeps '", spec.name, "' for parameter '", w.spec.name,
                  "' in a shape of its own: ranks with an empty shard would not write it");
      kept.values.push_back(make_state(spec, w));
    }
    kept_.push_back(std::move(kept));
  }
  numbers_ = at::zeros({static_cast<std::int64_t>(ways_.size()), 4},
                       at::TensorOptions(params_.device()).dtype(at::kDouble));
}

void Optimizer::begin_step(double lr) {
  MOESH_CHECK(std::isfinite(lr) && lr >= 0, ErrorKind::config, "a step with learning rate ", lr,
              "; it takes a number from 0 on");
  for (std::size_t i = 0; i < ways_.size(); ++i) {
    const RuleStep step{numbers_[static_cast<std::int64_t>(i)]};
    step.lr().fill_(lr * ways_[i].lr_scale);
    step.number().fill_(static_cast<double>(num_steps_ + 1));
  }
}

void Optimizer::update(const at::Tensor& factor, const at::Tensor& skip) {
  const at::NoGradGuard no_grad;
  const auto gradients = params_.gradients();
  numbers_.select(1, 2).copy_(factor);
  numbers_.select(1, 3).copy_(skip);
  for (std::size_t r = 0; r < ways_.size(); ++r) {
    const Rule& rule = *ways_[r].rule;
    std::vector<ParamInStep> moving;
    for (std::size_t i = 0; i < params_.size(); ++i) {
      const auto& [stored, decay] = params_[i];
      if (kept_[i].way != r || (rule.scope() == RuleScope::element && stored->value.numel() == 0))
        continue;
      moving.push_back({.stored = stored,
                        .value = stored->value.detach(),
                        .gradient = gradients[i].contiguous(),
                        .state = kept_[i].values,
                        .decay = decay});
    }
    rule.update(moving, {numbers_[static_cast<std::int64_t>(r)]});
  }
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const Stored& w = *params_[i].stored;
    kept_[i].writes_copy =
        w.copy && w.copy->version == static_cast<std::int64_t>(w.value._version());
  }
}

void Optimizer::note_replayed() {
  const auto raise = [](const at::Tensor& t) { t.unsafeGetTensorImpl()->bump_version(); };
  for (std::size_t i = 0; i < params_.size(); ++i) {
    raise(params_[i].stored->value);
    for (const auto& t : kept_[i].values) raise(t);
    if (kept_[i].writes_copy) raw::note_copy_written(*params_[i].stored);
  }
}

void Optimizer::end_step(bool skipped) {
  if (!skipped) ++num_steps_;
  zero_grad();
}

std::vector<Optimizer::StateTensor> Optimizer::state() const {
  std::vector<StateTensor> all;
  for (std::size_t i = 0; i < params_.size(); ++i)
    for (std::size_t s = 0; s < kept_[i].specs.size(); ++s) {
      const StateSpec& spec = kept_[i].specs[s];
      all.push_back({.name = params_[i].stored->spec.name + "." + spec.name,
                     .param = params_[i].stored,
                     .value = kept_[i].values[s],
                     .is_sharded = !spec.shape.has_value()});
    }
  return all;
}

void Optimizer::set_num_steps(std::int64_t n) {
  MOESH_CHECK(n >= 0, ErrorKind::data, "an optimizer that has taken ", n,
              " steps; it takes a number from 0 on");
  num_steps_ = n;
}

}  // namespace moesh::optim
