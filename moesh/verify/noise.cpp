#include "moesh/verify/verify.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "moesh/base/random.h"
#include "moesh/base/text.h"
#include "moesh/fsdp/param.h"
#include "moesh/nn/qk_clip.h"
#include "moesh/optim/rules.h"
#include "moesh/spmd/ops.h"
#include "moesh/train/build.h"
#include "moesh/train/checkpointer.h"

namespace moesh::verify {
namespace {

// By how much a dtype rounds 1 at most.
double roundoff(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble: return 0x1p-53;
    case at::kFloat: return 0x1p-24;
    case at::kHalf: return 0x1p-11;
    default: return 0x1p-8;
  }
}

at::Tensor distance(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs_();
}

// For each row (index of dim 0), or for a whole vector.
at::Tensor root_mean_square_of_rows(const at::Tensor& x) {
  if (x.numel() == 0) return x;
  std::vector<std::int64_t> dims(static_cast<size_t>(x.dim()));
  std::iota(dims.begin(), dims.end(), 0);
  if (x.dim() >= 2) dims.erase(dims.begin());
  return x.square().mean(dims, /*keepdim=*/true).sqrt();
}

// At least what its row has in the mean: a single element may be near by chance.
at::Tensor at_least_as_its_row(const at::Tensor& noise) {
  return at::maximum(noise, root_mean_square_of_rows(noise));
}

// For each row, or for a whole vector.
at::Tensor median_of_rows(const at::Tensor& x) {
  if (x.numel() == 0) return x;
  if (x.dim() < 2) return x.median();
  std::vector<std::int64_t> rows(static_cast<size_t>(x.dim()), 1);
  rows[0] = x.size(0);
  return std::get<0>(x.flatten(1).median(1)).reshape(rows);
}

// Where every element of its row is zero: of a single element zero may be rounding.
at::Tensor is_empty_row(const at::Tensor& t) {
  if (t.dim() < 2 || t.numel() == 0) return t.eq(0).all();
  std::vector<std::int64_t> rows(static_cast<size_t>(t.dim()), 1);
  rows[0] = t.size(0);
  return t.eq(0).flatten(1).all(1).reshape(rows);
}

bool is_of_step_from(const std::string& name, std::optional<std::int64_t> first) {
  return first && step_of(name) >= *first;
}

// How much of each gradient is noise, from the least on.
std::vector<double> noise_of_gradients(const NamedTensors& run) {
  const auto lost = first_lost(run);
  std::vector<double> all;
  for (const auto& [name, noise] : run.noise) {
    if (!is_gradient(name) || is_of_step_from(name, lost)) continue;
    const double relative = size_of(noise) / size_of(run[name]);  // of no gradient at all: NaN
    if (std::isfinite(relative)) all.push_back(relative);
  }
  std::ranges::sort(all);
  return all;
}
double quantile(const std::vector<double>& sorted, double fraction) {
  if (sorted.empty()) return 0;
  return sorted[static_cast<size_t>(fraction * static_cast<double>(sorted.size() - 1))];
}

// One rank may find a zero that a mesh, which sums in another order, misses by some roundings.
double noise_of_zero(double typical, double unit, const at::Tensor& gradient) {
  constexpr double kRoundings = 4;
  return kRoundings * unit * typical /
         std::sqrt(std::max(1., static_cast<double>(gradient.numel())));
}

// How a rule that sees all of a parameter (Muon) rounds what it is given: a gradient that is off by
// less may flip such a rounding. 0: the rule sees elements only.
double rounding_of_rule(const Stored& w, const config::Config& config) {
  if (config.optimizer.name != "muon" || !optim::is_for_muon(w)) return 0;
  if (w.spec.dtype == at::kDouble) return roundoff(at::kDouble);
  return roundoff(config.optimizer.muon_float32 ? at::kFloat : at::kBFloat16);
}

// The matrices of a parameter that such a rule takes one by one: [matrices, n, m].
at::Tensor as_matrices(const at::Tensor& t, const Stored& w, const config::Config& config) {
  if (t.dim() == 3) return t;
  return t.unflatten(0, {config.optimizer.muon_by_head ? w.spec.num_heads : 1, -1});
}

// A row of these has no gradient at all where no token comes to it. In others a row of zeros is a
// sum that cancels, and may be noise on a mesh.
bool has_rows_of_tokens(const Stored& w) {
  return contains(w.cutting, ep) || w.spec.name.find("embed_tokens") != std::string::npos;
}

std::string name_of(std::int64_t step, const std::string& what) {
  return "step " + std::to_string(step) + " " + what;
}

bool is_norm(const std::string& name) { return name.ends_with(" gradient norm"); }

// By how much runs nearby differ, or infinitely far where one of them is not finite.
double noise_in(const NamedTensors& run, const std::string& name) {
  const auto found = run.noise.find(name);
  const double size = found == run.noise.end() ? 0 : size_of(found->second);
  return std::isfinite(size) ? size : INFINITY;
}

}  // namespace

at::ScalarType noise_type(const config::Config& config) {
  const at::ScalarType own = config::scalar_type(config);
  return config::float8(config).any() && own != at::kDouble ? at::kBFloat16 : own;
}

std::optional<std::int64_t> first_lost(const NamedTensors& run) {
  for (std::int64_t step = 1; run.noise.contains(name_of(step, "loss")); ++step) {
    const std::string loss = name_of(step, "loss");
    const double noise = noise_in(run, loss);
    if (std::isinf(noise) || kNoiseAllowed * noise > size_of(run[loss]) ||
        std::isinf(noise_in(run, name_of(step, "gradient norm"))))
      return step;
  }
  return std::nullopt;
}

LeftOut left_out(const NamedTensors& run, std::int64_t steps) {
  const auto lost = first_lost(run);
  LeftOut result;
  if (lost) result.steps = steps - *lost;
  for (const auto& [name, weight] : run.weight)
    if (weight.numel() > 0 && !weight.any().item<bool>() && !is_of_step_from(name, lost))
      ++(is_gradient(name) || is_norm(name) ? result.gradients : result.tensors);
  return result;
}

std::string LeftOut::describe() const {
  std::string text;
  const auto add = [&](std::int64_t count, const char* what, const char* why) {
    if (count > 0) text += (text.empty() ? "" : ", ") + counted(count, what) + why;
  };
  add(steps, "step", " (rounding decides the loss)");
  add(tensors, "tensor", " (rounding decides where it moves)");
  add(gradients, "gradient", " (rounding decides half of it)");
  add(against_float64, "tensor", " against float64 (rounding decides half of it)");
  return text;
}

std::string movement_name(const std::string& param) { return "movement of " + param; }

at::Tensor Nearby::draw(const Stored& w, std::int64_t step) const {
  const Random random(seed_, w.spec.name + " " + std::to_string(step));
  return at::rand(w.value.sizes(), at::detail::createCPUGenerator(random.bits(0)), at::kDouble)
      .mul_(2)
      .sub_(1)
      .to(w.value.device());
}

void Nearby::move_weights(models::Model& model) const {
  model.each_param([&](Stored& w, bool) {
    const double unit = roundings_ * roundoff(w.spec.compute.value_or(w.spec.dtype));
    const at::Tensor value = w.value.detach(), wide = value.to(at::kDouble);
    value.copy_(wide.add(wide.mul(draw(w, -1)), unit));
  });
}

void Nearby::move_gradients(models::Model& model, std::int64_t step) const {
  const double typical = typical_gradient(run_, step);
  model.each_param([&](Stored& w, bool) {
    if (!w.spec.trained) return;
    const at::Tensor gradient = raw::gradient(w);
    const at::Tensor& right = run_[gradient_name(w.spec.name, step)];
    at::Tensor noise = at_least_as_its_row(distance(gradient, right));
    if (!has_rows_of_tokens(w))
      noise.clamp_min_(noise_of_zero(typical, roundings_ * roundoff(dtype_), right));
    w.value.mutable_grad() = right.to(at::kDouble)
                                 .add(noise.mul(draw(w, step).sign_()), kNoiseAllowed)
                                 .to(gradient.options());
  });
}

at::Tensor Nearby::signs(const Stored& w) const { return draw(w, 0).sign_(); }

void note_nearby(NamedTensors& run, const NamedTensors& nearby) {
  for (const auto& [name, value] : run.tensors) {
    const at::Tensor far = distance(value, nearby[name]);
    at::Tensor& noise = run.noise[name];
    noise = noise.defined() ? at::maximum(noise, far) : far;
  }
}

void set_noise(NamedTensors& run, at::ScalarType dtype, double roundings) {
  const double unit = roundings * roundoff(dtype);
  const auto relative = noise_of_gradients(run);
  const auto lost = first_lost(run);
  const double of_many = quantile(relative, 0.5), of_few = quantile(relative, 0.9);
  std::map<std::int64_t, double> squares;  // of the noise of the gradients of each step
  std::map<std::int64_t, double> typical;
  for (const auto& [name, value] : run.tensors)
    if (is_gradient(name) && !typical.contains(step_of(name)))
      typical[step_of(name)] = typical_gradient(run, step_of(name));
  for (const auto& [name, value] : run.tensors) {
    at::Tensor& noise = run.noise[name];
    const auto count = static_cast<double>(value.numel());
    const at::Tensor size = value.to(at::kDouble).abs();
    if (!is_gradient(name)) {
      noise = at::maximum(noise, 2 * unit * size);
      continue;
    }
    noise = at::maximum(noise, (count < kFewElements ? of_few : of_many) * size)
                .clamp_min(noise_of_zero(typical.at(step_of(name)), unit, value));
    squares[step_of(name)] += std::pow(size_of(noise), 2);
  }
  for (const auto& [step, square] : squares)
    if (const auto found = run.noise.find(name_of(step, "gradient norm")); found != run.noise.end())
      found->second = at::maximum(found->second, at::full_like(found->second, std::sqrt(square)));
  for (const auto& [name, value] : run.tensors) {
    if (!is_of_step_from(name, lost)) continue;
    // Counts are exact: the routing is replayed. Whether a step is skipped is so where all agree.
    const bool is_exact = !at::isFloatingType(value.scalar_type()) ||
                          (name == name_of(step_of(name), "skipped") && noise_in(run, name) < 0.5);
    if (!is_exact) run.weight[name] = at::zeros_like(value, at::kDouble);
  }
}

std::string largest_logits_name(nn::Attention& attention, std::int64_t step) {
  return name_of(step, "largest logits of ") + attention.logit_rows().front().weight->spec.name;
}

void set_movement_noise(NamedTensors& run, const config::Config& config, std::int64_t steps) {
  const OneRankScope scope;
  const at::NoGradGuard no_grad;
  const auto model = train::make_model(config);
  train::load_initial_weights(config, *model);
  if (first_lost(run)) {  // where parameters go then, nobody knows
    model->each_param([&](Stored& w, bool) {
      const std::string& name = w.spec.name;
      if (!w.spec.trained) run.noise[name].zero_();
      if (!w.spec.trained) return;
      for (const std::string& moved : {name, movement_name(name)})
        run.weight[moved] = at::zeros_like(run[moved], at::kDouble);
    });
    return;
  }
  const double max_norm = train::step_options(config).max_norm;
  // How far a gradient may be off, with the norm by which it is clipped.
  const auto allowed_of = [&](const Stored& w, std::int64_t step) {
    const std::string name = gradient_name(w.spec.name, step);
    const at::Tensor g = run[name].to(at::kDouble);
    at::Tensor noise = at_least_as_its_row(run.noise.at(name));
    if (max_norm > 0) {
      const std::string norm = name_of(step, "gradient norm");
      noise = at::hypot(noise, g * (run.noise.at(norm) / run[norm]).nan_to_num_());
    }
    if (has_rows_of_tokens(w)) noise = noise.masked_fill(is_empty_row(g), 0);
    return at::maximum(noise.mul_(kNoiseAllowed), rounding_of_rule(w, config) * g.abs());
  };
  // Every step rounds what it stores: steps back and forth leave little of what was rounded.
  std::map<std::string, at::Tensor> initial, farthest, largest, is_known;
  model->each_param([&](Stored& w, bool) {
    const std::string& name = w.spec.name;
    if (!w.spec.trained) {
      run.noise[name].zero_();
      return;
    }
    initial[name] = w.value.detach().clone();
    farthest[name] = at::zeros_like(initial[name], at::kDouble);
    largest[name] = initial[name].to(at::kDouble).abs();
    is_known[name] = at::ones_like(initial[name], at::kBool);
    for (std::int64_t step = 0; step < steps; ++step) {
      const at::Tensor allowed = allowed_of(w, step);
      is_known[name].logical_and_(run[gradient_name(name, step)]
                                      .to(at::kDouble)
                                      .abs()
                                      .gt(allowed)
                                      .logical_or_(allowed.eq(0)));
    }
  });
  // All signs of the noise, one for each step, or the same again after four; a rule may look at the
  // whole parameter, so elements have signs of their own besides.
  const Nearby signs_of_elements(run, config::scalar_type(config), 0);
  const std::int64_t num_signs = std::min<std::int64_t>(steps, 4);
  for (std::int64_t signs = 0; signs < std::int64_t{1} << num_signs; ++signs) {
    const auto each_trained = [&](const std::function<void(Stored&)>& f) {
      model->each_param([&](Stored& w, bool) {
        if (w.spec.trained) f(w);
      });
    };
    each_trained([&](Stored& w) { w.value.detach().copy_(initial[w.spec.name]); });
    const auto optimizer = train::make_optimizer(*model, config);
    for (std::int64_t step = 0; step < steps; ++step) {
      const double sign = (signs >> (step % num_signs) & 1) != 0 ? 1 : -1;
      const at::Tensor &norm = run[name_of(step, "gradient norm")],
                       &skipped = run[name_of(step, "skipped")];
      each_trained([&](Stored& w) {
        const at::Tensor g = run[gradient_name(w.spec.name, step)].to(at::kDouble);
        w.value.mutable_grad() =
            (g + sign * signs_of_elements.signs(w) * allowed_of(w, step)).to(w.value.scalar_type());
      });
      optimizer->begin_step(train::learning_rates(config)(step));
      optimizer->update(max_norm > 0 ? raw::clip_factor(norm, max_norm) : at::ones_like(norm),
                        skipped);
      if (const double tau = train::step_options(config).qk_clip; tau > 0)
        for (nn::Attention* a : model->attentions()) {
          const std::string logits = largest_logits_name(*a, step);
          nn::clip_logits(*a, run[logits] + sign * kNoiseAllowed * run.noise.at(logits), tau,
                          skipped);
        }
      optimizer->end_step(skipped.item<double>() != 0);
      each_trained([&](Stored& w) {
        at::Tensor& most = largest[w.spec.name];
        most = at::maximum(most, w.value.detach().to(at::kDouble).abs());
      });
    }
    each_trained([&](Stored& w) {
      const std::string& name = w.spec.name;
      const at::Tensor moved = w.value.detach().to(at::kDouble) - initial[name].to(at::kDouble);
      farthest[name] = at::maximum(farthest[name], distance(moved, run[movement_name(name)]));
    });
  }
  // A rule that sees matrices spreads the noise of an element over all of its matrix, and makes a
  // direction that has no gradient as long as the others: of the 2 that it may turn by, samples
  // have about the root of 2 and less. Where that is as far as the matrix moves, nobody knows where
  // it goes.
  model->each_param([&](Stored& w, bool) {
    const std::string& name = w.spec.name;
    if (!w.spec.trained || rounding_of_rule(w, config) == 0) return;
    const at::Tensor spread = 2 * root_mean_square_of_rows(as_matrices(farthest[name], w, config));
    const at::Tensor far = at::maximum(as_matrices(farthest[name], w, config), spread),
                     moves = root_mean_square_of_rows(
                         as_matrices(run[movement_name(name)].to(at::kDouble), w, config));
    farthest[name] = far.reshape(farthest[name].sizes());
    is_known[name].logical_and_(spread.lt(moves).expand_as(far).reshape(farthest[name].sizes()));
  });
  for (const auto& [name, far] : farthest) {
    const std::string moved = movement_name(name);
    const double unit = roundoff(run[name].scalar_type());
    const at::Tensor known = is_known[name].to(at::kDouble),
                     stored = largest[name] + run[moved].abs(),
                     // One that comes near by chance has at least half of what its row has.
        most = at::maximum(far, median_of_rows(far) / 2),
                     allowed = (most + kNoiseAllowed * unit * stored).clamp_min(unit * unit);
    run.noise[name] = known * allowed / kNoiseAllowed;
    run.weight[name] = known;
    run.noise[moved] = known / kNoiseAllowed;
    run.weight[moved] = known / allowed;
  }
}

double roundings_in_float64(at::ScalarType dtype) {
  return kMostRoundings * roundoff(dtype) / roundoff(at::kDouble);
}

bool is_bounded(const std::string& name) { return name.starts_with("d(") || name == "logits"; }

// Whether rounding decides how large some gradient is: where it only turns one, or moves some of
// its elements, the size stays about the same. A few may be small by chance.
bool decides_sizes(const std::vector<NamedTensors>& runs) {
  const auto& first = runs.front().tensors;
  return std::ranges::any_of(first, [&](const auto& tensor) {
    if (!tensor.first.starts_with("d(") || tensor.second.numel() < kFewElements) return false;
    double least = INFINITY, most = 0;
    for (const NamedTensors& run : runs) {
      const double size = size_of(run[tensor.first]);
      least = std::min(least, size), most = std::max(most, size);
    }
    return most > 2 * least;
  });
}

AgainstFloat64 against_float64(const std::vector<NamedTensors>& runs, at::ScalarType dtype,
                               const NamedTensors& in_float64) {
  AgainstFloat64 found;
  const bool are_sizes_decided = decides_sizes(runs);
  const double typical = typical_gradient(in_float64);
  for (const auto& [name, value] : in_float64.tensors) {
    if (!is_bounded(name)) continue;
    const at::Tensor right = value.to(at::kDouble);
    const double bound = size_of(in_float64.noise.at(name)),
                 noise = size_of(runs.front().noise.at(name));
    Mismatch m{.tensor = name + " of one rank in " + c10::toString(dtype) + ", against float64",
               .allowed = std::max(bound, std::min(kNoiseAllowed * noise, kMostOfBound * bound))};
    for (const NamedTensors& run : runs) {
      const double off = size_of(distance(run[name], right));
      m.error = std::isfinite(off) ? std::max(m.error, off) : INFINITY;
      m.factors = {(run[name].to(at::kDouble) * right).sum().item<double>() /
                   right.square().sum().item<double>()};
    }
    const bool may_be_anything = bound > size_of(right) / 2 && std::isfinite(m.error);
    found.num_that_may_be_anything += may_be_anything;
    // A sum that cancels is zero in float64, and stays so.
    if (may_be_anything && are_sizes_decided && is_gradient(name) &&
        size_of(right) > roundoff(at::kFloat) * typical)
      found.decided.push_back(name);
    if (m.error > m.allowed && !may_be_anything) found.unexplained.push_back(std::move(m));
  }
  return found;
}

void leave_decided(NamedTensors& run, const std::vector<std::string>& gradients) {
  if (gradients.empty()) return;
  for (const auto& [name, value] : run.tensors) {
    const bool is_among = std::ranges::any_of(
        gradients, [&](const std::string& g) { return name == g || name.ends_with(" " + g); });
    if (is_among || (is_norm(name) && kNoiseAllowed * noise_in(run, name) > size_of(value)))
      run.weight[name] = at::zeros_like(value, at::kDouble);
  }
}

}  // namespace moesh::verify
