#include "moesh/train/step.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/base/sections.h"
#include "moesh/spmd/backward.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/reduce.h"
#include "moesh/spmd/transitions.h"
#include "moesh/spmd/whole.h"

namespace moesh::train {
namespace {

using enum Place;

// Where in Unread::sums.
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
  at::Tensor sum = at::zeros({}, options.dtype(at::kDouble));
  for (const auto& found : checks.found) sum.add_(found.select(0, 0));
  return assume<Dense{P, P, P}>(sum);
}

models::ForwardResult forward_of(models::Model& model, const models::MicroBatch& batch,
                                 const StepOptions& options) {
  const InSection section(Section::forward);
  return model.forward(batch, options.forward);
}

void backward_of(const models::ForwardResult& result, ReduceLater& reductions) {
  const InSection section(Section::backward);
  backward(result.loss);
  reductions.start();
}

}  // namespace

Unread start_gradients(models::Model& model, std::vector<models::MicroBatch> batches,
                       const StepOptions& options) {
  MOESH_CHECK(!batches.empty(), ErrorKind::config,
              "a step of no micro-batch; gradient_accumulation_steps is 1 or more");
  const kernels::UseGpuKernels chosen(model.gpu_kernels());
  const nn::CheckLater later;
  ReduceLater reductions(options.overlap);
  const at::Tensor num_tokens = count_valid(batches);
  std::vector<nn::TokenSum> losses(2), counts;  // cross-entropy and total; of each MoE layer
  nn::TokenSum auxiliary;
  for (auto& batch : batches) {
    batch.num_step_tokens = num_tokens.clamp_min(1);
    batch.index = &batch - batches.data();
    const auto result = forward_of(model, batch, options);
    backward_of(result, reductions);
    const auto add = [](nn::TokenSum& sum, const nn::TokenSum& term) {
      sum = local(sum).defined() ? sum + term : term;
    };
    add(losses[0], cast(detach(result.cross_entropy), at::kDouble));
    add(losses[1], cast(detach(result.loss), at::kDouble));
    if (local(result.auxiliary).defined())
      add(auxiliary, cast(detach(result.auxiliary), at::kDouble));
    counts.resize(result.counts_E.size());
    for (size_t i = 0; i < counts.size(); ++i) add(counts[i], result.counts_E[i]);
  }
  {
    const InSection section(Section::reduce);
    reductions.finish();
  }
  Unread step{.checks = later.checks()};
  // One message for all of it: float64 holds every count.
  losses.push_back(num_failed(step.checks, num_tokens.options()));
  std::vector<nn::TokenSum> terms{stack(losses)};
  step.has_auxiliary = local(auxiliary).defined();
  if (step.has_auxiliary) terms.push_back(auxiliary);
  for (const auto& count : counts) {
    terms.push_back(cast(count, at::kDouble));
    step.num_experts.push_back(local(count).numel());
  }
  step.sums = at::cat({num_tokens.reshape({1}), whole(all_reduce<kTokenAxes>(cat(terms, 0)))});
  return step;
}

void start_update(models::Model& model, optim::Optimizer& optimizer, Unread& step,
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
  for (auto* router : model.routers()) {
    if (options.bias_coeff != 0)
      router->update_bias(options.bias_coeff, skip);
    else
      router->clear_counts();
  }
  std::vector<at::Tensor> numbers{whole(norm), skip};
  for (auto* router : model.routers()) {
    const auto [least, largest] = router->expert_bias().aminmax();
    numbers.push_back(least.to(at::kDouble)), numbers.push_back(largest.to(at::kDouble));
  }
  step.update = at::stack(numbers);
}

StepResult read(const Unread& step) {
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
  if (step.update.defined()) {
    const at::Tensor update = take_numbers(step.update.numel());
    const auto* number = update.const_data_ptr<double>();
    result.update = {.grad_norm = number[0], .bias = {}, .skipped = number[1] != 0};
    for (std::int64_t i = 2; i < update.numel(); i += 2)
      result.update.bias.push_back({.least = number[i], .largest = number[i + 1]});
  }
  step.checks.raise(rest.const_data_ptr<std::int64_t>());
  return result;
}

StepResult take_step(models::Model& model, optim::Optimizer& optimizer,
                     std::vector<models::MicroBatch> batches, double lr,
                     const StepOptions& options) {
  optimizer.begin_step(lr);
  Unread step = start_gradients(model, std::move(batches), options);
  start_update(model, optimizer, step, options);
  try {
    const StepResult result = read(step);
    optimizer.end_step(result.update.skipped);
    return result;
  } catch (...) {
    optimizer.zero_grad();  // whoever goes on with another batch begins from nothing
    throw;
  }
}

Gradients accumulate_gradients(models::Model& model, std::vector<models::MicroBatch> batches,
                               const StepOptions& options) {
  return read(start_gradients(model, std::move(batches), options)).gradients;
}

Update apply_gradients(models::Model& model, optim::Optimizer& optimizer,
                       const Gradients& gradients, double lr, const StepOptions& options) {
  optimizer.begin_step(lr);
  Unread step = gradients.on_device;
  start_update(model, optimizer, step, options);
  const Update update = read(step).update;
  optimizer.end_step(update.skipped);
  return update;
}

}  // namespace moesh::train
