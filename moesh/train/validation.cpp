#include "moesh/train/validation.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include "moesh/fsdp/step_state.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"

namespace moesh::train {
namespace {

using enum Place;

// Sums of the ranks with the last stage; the others have nothing to add. The next token is the
// first of the depths.
struct ValidationSum {
  nn::TokenSum sums;                     // of each depth: cross-entropy, tokens accepted
  std::vector<std::int64_t> num_tokens;  // of each depth, of this dp rank

  ValidationSum(std::int64_t num_mtp, const at::TensorOptions& options)
      : sums(no_term({1 + num_mtp, 2}, options)), num_tokens(static_cast<size_t>(1 + num_mtp)) {}

  void add(const models::MicroBatch& batch, const models::ForwardResult& result) {
    if (!local(result.cross_entropy).defined()) return;
    const auto wide = [](const nn::TokenSum& t) { return cast(detach(t), at::kDouble); };
    const auto pair = [&](const nn::TokenSum& loss, const nn::TokenSum& accepted) {
      return stack(std::vector{wide(loss), wide(accepted)});
    };
    const auto count = [](const at::Tensor& valid) { return valid.sum().item<std::int64_t>(); };
    std::vector<nn::TokenSum> depths{pair(result.cross_entropy, result.cross_entropy)};
    num_tokens[0] += count(batch.valid_BL());
    for (size_t k = 0; k < result.predicted.size(); ++k) {
      depths.push_back(pair(result.predicted[k].cross_entropy, result.predicted[k].num_accepted));
      num_tokens[k + 1] += count(batch.ahead[k].valid_BL());
    }
    sums = sums + stack(depths);
  }
};

ValidationLoss mean_of(const std::string& name, const ValidationSum& sum) {
  const at::Tensor total = whole(sum_over_stages(all_reduce<kTokenAxes>(sum.sums))).cpu();
  const at::Tensor mine = at::tensor(sum.num_tokens).to(local(sum.sums).device());
  const at::Tensor tokens =  // cp and tp have the same
      whole(sum_over_stages(all_reduce<dp, I>(assume<Dense{P, I, I}>(mine)))).cpu();
  const at::Tensor means = total / tokens.unsqueeze(1).to(at::kDouble);
  const auto mean = means.accessor<double, 2>();
  ValidationLoss result{.name = name, .loss = mean[0][0]};
  for (std::int64_t k = 1; k < means.size(0); ++k)
    if (tokens[k].item<std::int64_t>() > 0)
      result.mtp.push_back({.loss = mean[k][0], .acceptance = mean[k][1]});
  return result;
}

}  // namespace

std::vector<ValidationSet> open_validation(const Config& config) {
  std::vector<ValidationSet> sets;
  for (const data::SourceOptions& source : config.validation.source)
    sets.push_back({source.name.empty() ? source.path : source.name,
                    data::open_dataset(validation_options(config, source))});
  return sets;
}

bool validation_is_due(const Config& config, std::int64_t num_steps) {
  return !config.validation.source.empty() &&
         (num_steps % config.validation.interval == 0 || num_steps == config.training.steps);
}

std::optional<std::vector<ValidationLoss>> validate_model(models::Model& model,
                                                          const Config& config, const Mesh& mesh,
                                                          const std::vector<ValidationSet>& sets,
                                                          const std::function<bool()>& stops) {
  const StepState state;  // of what is gathered ahead
  const at::NoGradGuard no_grad;
  const kernels::UseGpuKernels chosen(model.gpu_kernels());
  const StepOptions of_step = step_options(config);
  models::ForwardOptions options = of_step.forward;
  options.pass = nn::Pass::evaluation;
  options.recompute = models::Recompute::none, options.auxiliary = {};
  std::vector<ValidationLoss> losses;
  for (const ValidationSet& set : sets) {
    ValidationSum sum(num_mtp_layers(config), at::TensorOptions(device(config)));
    const data::OneEpoch once(*set.dataset);
    const std::int64_t per_step = sample_order(config).num_per_step(), size = *once.size();
    for (std::int64_t step = 0; step < config.validation.steps && step * per_step < size; ++step) {
      const auto batches = step_batches(config, once, mesh, step * per_step);
      run_pipeline(model, batches, options,
                   forwards_of(schedule_of(of_step.pipeline, batches.size())), nullptr,
                   [&](const pipeline::Action& a, const models::ForwardResult& result) {
                     sum.add(batches[static_cast<std::size_t>(a.micro_batch)], result);
                   });
      if (stops()) return std::nullopt;
    }
    losses.push_back(mean_of(set.name, sum));
  }
  return losses;
}

}  // namespace moesh::train
