#pragma once
// From a configuration to a model, its optimizer and its step.

#include <memory>

#include "moesh/config/config.h"
#include "moesh/formats/disk.h"
#include "moesh/models/registry.h"
#include "moesh/optim/optimizer.h"
#include "moesh/train/step.h"

namespace moesh::train {

using config::Config;
using config::ModelFacts;
using config::ModelKeys;
using config::OptimizerSection;

/// The built-in configuration that model.name and model.size stand for, changed by the further keys
/// of [model].
struct ModelSetup {
  models::AnyConfig config;

  /// What [model] may set; points into this object.
  ModelKeys keys() { return models::keys(config); }
  ModelFacts facts() const { return models::facts(config); }
};

ModelSetup model_setup(Config& config);

/// On the current mesh.
std::unique_ptr<models::Model> make_model(const ModelSetup& setup, const Config& config);

std::unique_ptr<optim::Optimizer> make_optimizer(models::Model& model,
                                                 const OptimizerSection& options);

models::ModelOptions model_options(const Config& config);

StepOptions step_options(const Config& config);

/// The model's names in folders.
formats::ModelOnDisk on_disk(const ModelSetup& setup);

}  // namespace moesh::train
