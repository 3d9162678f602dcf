#include "moesh/train/validation.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include "moesh/fsdp/step_state.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"

namespace moesh::train {
namespace {

using enum Place;

// What ranks with the last stage add up; the others have nothing to add.
struct ValidationSum {
  nn::TokenSum loss;
  std::int64_t num_tokens = 0;  // of this dp rank

  void add(const models::MicroBatch& batch, const nn::TokenSum& cross_entropy) {
    if (!local(cross_entropy).defined()) return;
    loss = loss + cast(detach(cross_entropy), at::kDouble);
    num_tokens += batch.valid_BL().sum().item<std::int64_t>();
  }
};

double mean_of(const ValidationSum& sum) {
  const at::Tensor total = whole(sum_over_stages(all_reduce<kTokenAxes>(sum.loss)));
  const auto tokens = assume<Dense{P, I, I}>(
      at::full({}, sum.num_tokens, total.options().dtype(at::kLong)));  // cp and tp have the same
  return total.item<double>() /
         static_cast<double>(
             whole(sum_over_stages(all_reduce<dp, I>(tokens))).item<std::int64_t>());
}

}  // namespace

std::vector<ValidationSet> open_validation(const Config& config) {
  std::vector<ValidationSet> sets;
  for (const config::ValidationSource& source : config.validation.source)
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
    ValidationSum sum{no_term({}, at::TensorOptions(device(config)))};
    const data::Once once(*set.dataset);
    const std::int64_t per_step = sample_order(config).num_per_step(), size = *once.size();
    for (std::int64_t step = 0; step < config.validation.steps && step * per_step < size; ++step) {
      const auto batches = step_batches(config, once, mesh, step * per_step);
      run_pipeline(
          model, batches, options, forwards_of(schedule_of(of_step.pipeline, batches.size())),
          nullptr, [&](const pipeline::Action& a, const models::ForwardResult& result) {
            sum.add(batches[static_cast<std::size_t>(a.micro_batch)], result.cross_entropy);
          });
      if (stops()) return std::nullopt;
    }
    losses.push_back({set.name, mean_of(sum)});
  }
  return losses;
}

}  // namespace moesh::train
