#include "moesh/optim/schedule.h"

#include <cmath>
#include <numbers>

#include "moesh/base/error.h"

namespace moesh::optim {
namespace {

using Kind = LrScheduleConfig::Curve;

std::int64_t num_decay_steps(const LrScheduleConfig& c) {
  if (c.kind != Kind::wsd) return c.num_steps - c.warmup_steps;
  return std::llround(c.decay_ratio * static_cast<double>(c.num_steps));
}

}  // namespace

void LrScheduleConfig::validate() const {
  MOESH_CHECK(num_steps >= 1, ErrorKind::config, "schedule: num_steps is ", num_steps,
              "; it takes 1 or more");
  MOESH_CHECK(warmup_steps >= 0 && warmup_steps <= num_steps, ErrorKind::config,
              "schedule: warmup_steps is ", warmup_steps, " of ", num_steps,
              " steps; it takes 0 to ", num_steps);
  MOESH_CHECK(min_lr_factor >= 0 && min_lr_factor <= 1, ErrorKind::config,
              "schedule: min_lr_factor is ", min_lr_factor,
              "; it is a factor of the peak and takes 0 to 1");
  if (kind != Kind::wsd) return;
  MOESH_CHECK(decay_ratio >= 0 && decay_ratio <= 1, ErrorKind::config, "schedule: decay_ratio is ",
              decay_ratio, "; it is a fraction of all steps and takes 0 to 1");
  const auto num_decay = num_decay_steps(*this);
  MOESH_CHECK(warmup_steps + num_decay <= num_steps, ErrorKind::config, "schedule: ", warmup_steps,
              " steps of warm-up and ", num_decay, " of decay (decay_ratio ", decay_ratio,
              ") do not fit into ", num_steps, " steps; set warmup_steps to ",
              num_steps - num_decay, " or less, or a smaller decay_ratio");
}

LrSchedule::LrSchedule(const LrScheduleConfig& config)
    : config_((config.validate(), config)), num_decay_steps_(num_decay_steps(config)) {}

double LrSchedule::factor(std::int64_t step) const {
  MOESH_CHECK(step >= 0, ErrorKind::config, "schedule: the factor of step ", step,
              "; steps count from 0");
  const auto& c = config_;
  if (step < c.warmup_steps)
    return static_cast<double>(step + 1) / static_cast<double>(c.warmup_steps);
  if (c.kind == Kind::constant) return 1;
  if (step >= c.num_steps) return c.min_lr_factor;
  const std::int64_t into_decay = step - (c.num_steps - num_decay_steps_);
  if (into_decay <= 0) return 1;
  const double p = static_cast<double>(into_decay) / static_cast<double>(num_decay_steps_);
  const double shape = c.kind == Kind::cosine ? (1 + std::cos(std::numbers::pi * p)) / 2 : 1 - p;
  return c.min_lr_factor + (1 - c.min_lr_factor) * shape;
}

}  // namespace moesh::optim
