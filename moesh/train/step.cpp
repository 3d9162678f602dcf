#include "moesh/train/step.h"

#include <ATen/ATen.h>

#include <cmath>

#include "moesh/base/error.h"
#include "moesh/spmd/all_reduce.h"
#include "moesh/spmd/backward.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/whole.h"

namespace moesh::train {
namespace {

using enum Place;

constexpr Axes kAll = dp | cp | tp;

// Every cp and tp rank has the labels of its dp rank whole.
std::int64_t count_valid(const std::vector<models::MicroBatch>& batches) {
  std::int64_t mine = 0;
  for (const auto& b : batches) mine += b.labels_BL.ne(-100).sum().item<std::int64_t>();
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
  Gradients g;
  g.num_tokens = count_valid(batches);
  at::Tensor loss, total;
  std::vector<at::Tensor> counts;
  for (auto& batch : batches) {
    batch.num_step_tokens = std::max<std::int64_t>(1, g.num_tokens);
    batch.index = &batch - batches.data();
    auto result = model.forward(batch, options.forward);
    backward(result.loss);
    const auto add = [](at::Tensor& sum, const nn::TokenSum& term) {
      const at::Tensor t = local(term).detach().to(at::kDouble);
      sum = sum.defined() ? sum + t : t;
    };
    add(loss, result.cross_entropy), add(total, result.loss);
    for (size_t i = 0; i < result.counts_E.size(); ++i) {
      if (counts.size() <= i)
        counts.push_back(result.counts_E[i]);
      else
        counts[i] = counts[i] + result.counts_E[i];
    }
    // The graph goes, and with it what its backward steps hold.
    result.loss = assume<nn::TokenSum::layout>(local(result.loss).detach());
    result.cross_entropy = assume<nn::TokenSum::layout>(local(result.cross_entropy).detach());
    g.last = std::move(result);
  }
  const at::Tensor sums =
      whole(all_reduce<kAll>(assume<Dense{P, P, P}>(at::stack({loss, total})))).cpu();
  g.loss = sums[0].item<double>(), g.total_loss = sums[1].item<double>();
  if (!counts.empty()) {
    const at::Tensor all = whole(all_reduce<kAll>(assume<Dense{P, P, P}>(at::stack(counts)))).cpu();
    for (std::int64_t i = 0; i < all.size(0); ++i) g.counts_E.push_back(all[i]);
  }
  return g;
}

Update apply_gradients(models::Model& model, optim::Optimizer& optimizer,
                       const Gradients& gradients, double lr, const StepOptions& options) {
  Update update;
  const auto norm = optim::grad_norm(optimizer.params());
  update.grad_norm = number(norm);
  update.skipped =
      !optim::all_finite(norm) || !std::isfinite(gradients.total_loss) || gradients.num_tokens == 0;
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
