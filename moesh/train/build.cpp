#include "moesh/train/build.h"

#include "moesh/models/disk.h"
#include "moesh/optim/adamw.h"
#include "moesh/optim/sgd.h"

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
    params.add(w, decays ? optim::Group::decay : optim::Group::no_decay);
  });
  if (o.name == "sgd")
    return std::make_unique<optim::Sgd>(
        params, optim::SgdConfig{.momentum = o.momentum, .weight_decay = o.weight_decay});
  return std::make_unique<optim::AdamW>(
      params,
      optim::AdamWConfig{
          .beta1 = o.beta1, .beta2 = o.beta2, .eps = o.eps, .weight_decay = o.weight_decay});
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
