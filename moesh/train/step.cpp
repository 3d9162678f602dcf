#include "moesh/train/step.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/base/timeline.h"
#include "moesh/fsdp/step_state.h"
#include "moesh/nn/qk_clip.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"

namespace moesh::train {
namespace {

using enum Place;

// Where in UnreadStep::sums.
enum : std::int64_t { kTokens, kCrossEntropy, kTotal, kFailed, kNumSums };

// Every cp and tp rank has the labels of its dp rank whole.
at::Tensor count_valid(const std::vector<models::MicroBatch>& batches) {
  at::Tensor mine;
  for (const auto& b : batches) {
    const at::Tensor count = b.valid_BL().sum().to(at::kDouble);
    mine = mine.defined() ? mine + count : count;
  }
  return whole(all_reduce<dp, I>(assume<Dense{P, I, I}>(mine)));
}

// A term of each rank, so that all ranks skip a step in which one has found something.
nn::TokenSum num_failed(const nn::CheckLater::Checks& checks, const at::TensorOptions& options) {
  const nn::TokenSum sum = no_term({}, options);
  for (const auto& found : checks.found) at::Tensor(local(sum)).add_(found.select(0, 0));
  return sum;
}

nn::TokenSum codes_of(const StepFloat8Counts& counts) {
  const nn::TokenSum sum = no_term({counts.all().numel()}, counts.all().options());
  at::Tensor(local(sum)).add_(counts.all().flatten());
  return sum;
}

// The sums of the forwards of this rank, in float64, which holds every count. A rank of a
// pipeline has the terms of its stages: the last one the cross-entropy, each those of its own MoE
// layers, at their places among all.
struct StepSums {
  std::vector<nn::TokenSum> losses;  // cross-entropy, and with the auxiliary losses
  nn::TokenSum auxiliary;
  std::vector<nn::TokenSum> counts;  // of each MoE layer of the model
  bool has_auxiliary;

  StepSums(const models::Model& model, const StepOptions& options)
      : losses(2),
        counts(static_cast<size_t>(model.num_moe_layers())),
        has_auxiliary(options.forward.auxiliary.any() && model.num_moe_layers() > 0) {}

  void add(const models::ForwardResult& result) {
    add_to(losses[0], result.cross_entropy);
    add_to(losses[1], result.loss);
    add_to(auxiliary, result.auxiliary);
    for (size_t i = 0; i < result.counts_E.size(); ++i)
      add_to(counts[static_cast<size_t>(result.first_moe_layer) + i], result.counts_E[i]);
  }
  // All of them in one, with zeros where this rank has none.
  nn::TokenSum joined(const models::Model& model, const nn::TokenSum& num_failed,
                      const at::TensorOptions& options) const {
    const auto or_none = [&](const nn::TokenSum& sum, at::IntArrayRef sizes) {
      return local(sum).defined() ? sum : no_term(sizes, options);
    };
    std::vector<nn::TokenSum> terms{
        stack(std::vector{or_none(losses[0], {}), or_none(losses[1], {}), num_failed})};
    if (has_auxiliary) terms.push_back(or_none(auxiliary, {models::kNumAuxiliary}));
    for (const auto& count : counts) terms.push_back(or_none(count, {model.num_experts()}));
    return cat(terms, 0);
  }

 private:
  static void add_to(nn::TokenSum& sum, const nn::TokenSum& term) {
    if (!local(term).defined()) return;
    const nn::TokenSum wide = cast(detach(term), at::kDouble);
    sum = local(sum).defined() ? sum + wide : wide;
  }
};

// The least and the largest expert bias of each MoE layer of the model, in turn.
at::Tensor bias_ranges(models::Model& model, const at::TensorOptions& options) {
  std::vector<at::Tensor> numbers(static_cast<size_t>(2 * model.num_moe_layers()),
                                  at::zeros({}, options.dtype(at::kDouble)));
  if (numbers.empty()) return at::zeros({0}, options.dtype(at::kDouble));
  const auto routers = model.routers();
  const auto places = model.router_numbers();
  for (size_t i = 0; i < routers.size(); ++i) {
    const auto [least, largest] = routers[i]->expert_bias().aminmax();
    numbers[static_cast<size_t>(2 * places[i])] = least.to(at::kDouble);
    numbers[static_cast<size_t>(2 * places[i] + 1)] = largest.to(at::kDouble);
  }
  return whole(sum_over_stages(constant(at::stack(numbers))));
}

}  // namespace

nn::TokenSum no_term(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return assume<Dense{P, P, P}>(at::zeros(sizes, options.dtype(at::kDouble)));
}

UnreadStep start_gradients(models::Model& model, std::vector<models::MicroBatch> batches,
                           const StepOptions& options) {
  MOESH_CHECK(!batches.empty(), ErrorKind::config,
              "a step of no micro-batch; gradient_accumulation_steps is 1 or more");
  const kernels::UseGpuKernels chosen(model.gpu_kernels());
  const nn::CheckLater later;
  StepState state(options.overlap);
  const at::Tensor num_tokens = count_valid(batches);
  const std::int64_t float8_layers = options.counts_float8 ? options.float8_layers : 0;
  if (float8_layers > 0)
    state.float8_counts = std::make_shared<StepFloat8Counts>(float8_layers, num_tokens.device());
  for (auto& batch : batches) {
    batch.num_step_tokens = num_tokens.clamp_min(1);
    batch.index = &batch - batches.data();
  }
  const auto schedule = schedule_of(options.pipeline, batches.size());
  StepSums sums(model, options);
  run_pipeline(
      model, batches, options.forward, schedule, &state,
      [&](const pipeline::Action&, const models::ForwardResult& result) { sums.add(result); },
      options.pipeline.overlap_experts);
  {
    const InSection section(Section::reduce);
    state.finish_sums();
    add_tied_gradients(model, schedule);
  }
  UnreadStep step{.checks = later.checks()};
  step.has_auxiliary = sums.has_auxiliary, step.float8_layers = float8_layers;
  step.num_experts.assign(sums.counts.size(), model.num_experts());
  // One message for all of it, and one more over the stages.
  nn::TokenSum mine =
      sums.joined(model, num_failed(step.checks, num_tokens.options()), num_tokens.options());
  if (state.float8_counts) mine = cat(std::vector{mine, codes_of(*state.float8_counts)}, 0);
  step.sums =
      at::cat({num_tokens.reshape({1}), whole(sum_over_stages(all_reduce<kTokenAxes>(mine)))});
  return step;
}

void start_update(models::Model& model, optim::Optimizer& optimizer, UnreadStep& step,
                  const StepOptions& options) {
  RECORD_USER_SCOPE("norm and update");
  const InSection section(Section::update);
  const kernels::UseGpuKernels chosen(model.gpu_kernels());
  const auto norm = optim::grad_norm(optimizer.params());
  const auto sum = [&](std::int64_t i) { return step.sums.select(0, i); };
  const at::Tensor is_good = whole(norm)
                                 .isfinite()
                                 .logical_and(sum(kTotal).isfinite())
                                 .logical_and(sum(kTokens).gt(0))
                                 .logical_and(sum(kFailed).eq(0));
  const at::Tensor skip = is_good.logical_not().to(at::kDouble);
  optimizer.update(options.max_norm > 0 ? clip_factor(norm, options.max_norm) : at::ones_like(skip),
                   skip);
  std::vector<at::Tensor> numbers{whole(norm), skip};
  step.has_max_logit = options.qk_clip > 0;
  if (step.has_max_logit)
    numbers.push_back(nn::clip_logits(model.attentions(), options.qk_clip, skip).to(at::kDouble));
  for (auto* router : model.routers()) {
    if (options.bias_coeff != 0)
      router->update_bias(options.bias_coeff, skip);
    else
      router->clear_counts();
  }
  step.update = at::cat({at::stack(numbers), bias_ranges(model, skip.options())});
}

StepResult read(const UnreadStep& step) {
  // Bits, since the checks have whole numbers of 64.
  std::vector<at::Tensor> parts{step.sums.view(at::kLong)};
  if (step.update.defined()) parts.push_back(step.update.view(at::kLong));
  parts.insert(parts.end(), step.checks.found.begin(), step.checks.found.end());
  at::Tensor rest = [&] {
    const InSection section(Section::waiting);
    return at::cat(parts).cpu();
  }();
  const auto take = [&](std::int64_t n) {
    const at::Tensor first = rest.narrow(0, 0, n);
    rest = rest.narrow(0, n, rest.size(0) - n);
    return first;
  };
  const auto take_numbers = [&](std::int64_t n) { return take(n).view(at::kDouble); };
  StepResult result;
  Gradients& g = result.gradients;
  g.on_device = step;
  const at::Tensor sums = take_numbers(kNumSums);
  const auto* sum = sums.const_data_ptr<double>();
  g.num_tokens = static_cast<std::int64_t>(sum[kTokens]);
  g.loss = sum[kCrossEntropy], g.total_loss = sum[kTotal];
  if (step.has_auxiliary) {
    const at::Tensor parts_of_loss = take_numbers(models::kNumAuxiliary);
    std::copy_n(parts_of_loss.const_data_ptr<double>(), models::kNumAuxiliary, g.auxiliary.begin());
  }
  for (const auto n : step.num_experts) g.counts_E.push_back(take_numbers(n).to(at::kLong));
  if (const auto layers = step.float8_layers; layers > 0)
    g.float8_counts = take_numbers(layers * 2 * 3 * 3).to(at::kLong).view({layers, 2, 3, 3});
  if (step.update.defined()) {
    const at::Tensor update = take_numbers(step.update.numel());
    const auto* number = update.const_data_ptr<double>();
    result.update.grad_norm = number[0];
    result.update.skipped = number[1] != 0;
    if (step.has_max_logit) result.update.max_logit = number[2];
    for (std::int64_t i = step.has_max_logit ? 3 : 2; i < update.numel(); i += 2)
      result.update.bias.push_back({.least = number[i], .largest = number[i + 1]});
  }
  step.checks.raise(rest.const_data_ptr<std::int64_t>());
  return result;
}

StepResult finish_step(models::Model& model, optim::Optimizer& optimizer, UnreadStep step,
                       const StepOptions& options) {
  start_update(model, optimizer, step, options);
  try {
    const StepResult result = read(step);
    optimizer.end_step(result.update.skipped);
    return result;
  } catch (...) {
    optimizer.zero_grad();  // another batch begins from nothing
    throw;
  }
}

StepResult take_step(models::Model& model, optim::Optimizer& optimizer,
                     std::vector<models::MicroBatch> batches, double lr,
                     const StepOptions& options) {
  optimizer.begin_step(lr);
  return finish_step(model, optimizer, start_gradients(model, std::move(batches), options),
                     options);
}

Gradients accumulate_gradients(models::Model& model, std::vector<models::MicroBatch> batches,
                               const StepOptions& options) {
  return read(start_gradients(model, std::move(batches), options)).gradients;
}

Update apply_gradients(models::Model& model, optim::Optimizer& optimizer,
                       const Gradients& gradients, double lr, const StepOptions& options) {
  optimizer.begin_step(lr);
  UnreadStep step = gradients.on_device;
  start_update(model, optimizer, step, options);
  const Update update = read(step).update;
  optimizer.end_step(update.skipped);
  return update;
}

}  // namespace moesh::train
