#include "moesh/train/build.h"

#include "moesh/config/options.h"
#include "moesh/models/disk.h"
#include "moesh/optim/registry.h"

namespace moesh::train {

ModelSetup model_setup(Config& config) {
  check_option(config, "model.size");
  ModelSetup setup{models::built_in(config.model.name, config.model.size)};
  apply_model_keys(config, setup.keys());
  return setup;
}

models::ModelOptions model_options(const Config& config) {
  return {.dtype = scalar_type(config),
          .device = device(config),
          .seed = static_cast<std::uint64_t>(config.training.seed),
          .dispatcher = dispatcher(config),
          .forced_balance = config.moe.force_load_balance};
}

formats::ModelOnDisk on_disk(const ModelSetup& setup) { return models::on_disk(setup.config); }

std::unique_ptr<models::Model> make_model(const ModelSetup& setup, const Config& config) {
  return models::make_model(setup.config, model_options(config));
}

std::unique_ptr<optim::Optimizer> make_optimizer(models::Model& model, const OptimizerSection& o) {
  optim::ParamList params;
  model.each_param([&](Stored& w, bool decays) {
    params.add(w, decays ? optim::Decay::on : optim::Decay::off);
  });
  const optim::RuleKind& kind = optim::find_rule(o.name);
  Config config;  // options are read from a whole one
  config.optimizer = o;
  optim::RuleValues values;
  for (const auto& key : kind.keys)
    values[key] = std::get<double>(config::find_option("optimizer." + key)->get(config));
  return std::make_unique<optim::Optimizer>(params, kind.make(values));
}

StepOptions step_options(const Config& config) {
  StepOptions options{.max_norm = config.training.max_norm,
                      .bias_coeff = config.moe.load_balance_coeff};
  options.forward = {.sequence_parallel = config.parallelism.sequence_parallel,
                     .recompute = config.activation_checkpoint.mode == "full",
                     .auxiliary = {config.moe.switch_loss_weight, config.moe.sequence_loss_weight,
                                   config.moe.z_loss_weight},
                     .reshard = config.parallelism.fsdp_reshard_after_forward};
  return options;
}

}  // namespace moesh::train
