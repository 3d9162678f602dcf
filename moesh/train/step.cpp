#include "moesh/train/step.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <cmath>

#include "moesh/base/error.h"
#include "moesh/spmd/backward.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"
#include "moesh/spmd/whole.h"

namespace moesh::train {
namespace {

using enum Place;

// Every cp and tp rank has the labels of its dp rank whole.
std::int64_t count_valid(const std::vector<models::MicroBatch>& batches) {
  std::int64_t mine = 0;
  for (const auto& b : batches) mine += b.valid_BL().sum().item<std::int64_t>();
  const auto device = batches.empty() ? at::Device(at::kCPU) : batches[0].labels_BL.device();
  const auto term =
      assume<Dense{P, I, I}>(at::full({}, mine, at::TensorOptions(device).dtype(at::kLong)));
  return whole(all_reduce<dp, I>(term)).item<std::int64_t>();
}

}  // namespace

Gradients accumulate_gradients(models::Model& model, std::vector<models::MicroBatch> batches,
                               const StepOptions& options) {
  MOESH_CHECK(!batches.empty(), ErrorKind::config,
              "a step of no micro-batch; gradient_accumulation_steps is 1 or more");
  const kernels::UseGpuKernels chosen(model.gpu_kernels());
  Gradients g;
  g.num_tokens = count_valid(batches);
  std::vector<nn::TokenSum> losses(2), counts;  // cross-entropy and total; of each MoE layer
  for (auto& batch : batches) {
    batch.num_step_tokens = std::max<std::int64_t>(1, g.num_tokens);
    batch.index = &batch - batches.data();
    const auto result = model.forward(batch, options.forward);
    backward(result.loss);
    const auto add = [](nn::TokenSum& sum, const nn::TokenSum& term) {
      sum = local(sum).defined() ? sum + term : term;
    };
    add(losses[0], cast(detach(result.cross_entropy), at::kDouble));
    add(losses[1], cast(detach(result.loss), at::kDouble));
    counts.resize(result.counts_E.size());
    for (size_t i = 0; i < counts.size(); ++i) add(counts[i], result.counts_E[i]);
  }
  // One message and one wait for all of it: float64 holds every count.
  std::vector<nn::TokenSum> terms{stack(losses)};
  for (const auto& count : counts) terms.push_back(cast(count, at::kDouble));
  at::Tensor rest = whole(all_reduce<kTokenAxes>(cat(terms, 0))).cpu();
  const auto take = [&](std::int64_t n) {
    const at::Tensor first = rest.narrow(0, 0, n);
    rest = rest.narrow(0, n, rest.size(0) - n);
    return first;
  };
  const at::Tensor sums = take(2);
  g.loss = sums[0].item<double>(), g.total_loss = sums[1].item<double>();
  for (const auto& count : counts) g.counts_E.push_back(take(local(count).numel()).to(at::kLong));
  return g;
}

Update apply_gradients(models::Model& model, optim::Optimizer& optimizer,
                       const Gradients& gradients, double lr, const StepOptions& options) {
  RECORD_USER_SCOPE("norm and update");
  Update update;
  const auto norm = optim::grad_norm(optimizer.params());
  update.grad_norm = number(norm);
  update.skipped = !std::isfinite(update.grad_norm) || !std::isfinite(gradients.total_loss) ||
                   gradients.num_tokens == 0;
  if (update.skipped) {
    optimizer.zero_grad();
    for (auto* router : model.routers()) router->clear_counts();
    return update;
  }
  if (options.max_norm > 0) optim::clip_gradients(optimizer.params(), norm, options.max_norm);
  optimizer.step(lr);
  for (auto* router : model.routers()) {
    if (options.bias_coeff != 0)
      router->update_bias(options.bias_coeff);
    else
      router->clear_counts();
  }
  return update;
}

}  // namespace moesh::train
