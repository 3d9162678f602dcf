#include "moesh/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "moesh/base/error.h"
#include "moesh/base/text.h"

namespace moesh::optim {
namespace {

struct Shape {
  std::string name;
  double (*value)(double p);  // from 1 to 0 with the part of the decay that is over; null: no decay
};
const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all{
      {"cosine", [](double p) { return (1 + std::cos(std::numbers::pi * p)) / 2; }},
      {"linear", [](double p) { return 1 - p; }},
      {"wsd", [](double p) { return 1 - p; }},
      {"constant", nullptr}};
  return all;
}

const Shape& shape_called(const std::string& name) {
  const auto found = std::find_if(shapes().begin(), shapes().end(),
                                  [&](const Shape& s) { return s.name == name; });
  MOESH_CHECK(found != shapes().end(), ErrorKind::config, "schedule: kind is '", name,
              "'; it takes ", joined_by_or(lr_schedule_names()));
  return *found;
}

std::int64_t num_decay_steps(const LrSchedule& c) {
  if (c.kind != "wsd") return c.num_steps - c.warmup_steps;
  return std::llround(c.decay_ratio * static_cast<double>(c.num_steps));
}

}  // namespace

const std::vector<std::string>& lr_schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Shape& s : shapes()) all.push_back(s.name);
    return all;
  }();
  return names;
}

void LrSchedule::validate() const {
  shape_called(kind);
  MOESH_CHECK(num_steps >= 1, ErrorKind::config, "schedule: num_steps is ", num_steps,
              "; it takes 1 or more");
  MOESH_CHECK(warmup_steps >= 0 && warmup_steps <= num_steps, ErrorKind::config,
              "schedule: warmup_steps is ", warmup_steps, " of ", num_steps,
              " steps; it takes 0 to ", num_steps);
  MOESH_CHECK(min_lr_factor >= 0 && min_lr_factor <= 1, ErrorKind::config,
              "schedule: min_lr_factor is ", min_lr_factor,
              "; it is a factor of the peak and takes 0 to 1");
  if (kind != "wsd") return;
  MOESH_CHECK(decay_ratio >= 0 && decay_ratio <= 1, ErrorKind::config, "schedule: decay_ratio is ",
              decay_ratio, "; it is a fraction of all steps and takes 0 to 1");
  const auto num_decay = num_decay_steps(*this);
  MOESH_CHECK(warmup_steps + num_decay <= num_steps, ErrorKind::config, "schedule: ", warmup_steps,
              " steps of warm-up and ", num_decay, " of decay (decay_ratio ", decay_ratio,
              ") do not fit into ", num_steps, " steps; set warmup_steps to ",
              num_steps - num_decay, " or less, or a smaller decay_ratio");
}

double LrSchedule::factor(std::int64_t step) const {
  MOESH_CHECK(step >= 0, ErrorKind::config, "schedule: the factor of step ", step,
              "; steps count from 0");
  if (step < warmup_steps) return static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  const Shape& shape = shape_called(kind);
  if (!shape.value) return 1;
  if (step >= num_steps) return min_lr_factor;
  const std::int64_t num_decay = num_decay_steps(*this),
                     into_decay = step - (num_steps - num_decay);
  if (into_decay <= 0) return 1;
  const double p = static_cast<double>(into_decay) / static_cast<double>(num_decay);
  return min_lr_factor + (1 - min_lr_factor) * shape.value(p);
}

}  // namespace moesh::optim
