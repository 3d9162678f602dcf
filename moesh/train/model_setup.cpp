#include "moesh/train/model_setup.h"

#include "moesh/models/disk.h"

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

}  // namespace moesh::train
