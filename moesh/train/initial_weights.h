#pragma once
// Weights that a model begins with: from a folder that moesh or others wrote, and what LoRA adds.

#include <filesystem>

#include "moesh/checkpoint/agree.h"
#include "moesh/config/config.h"
#include "moesh/models/model.h"

namespace moesh::train {

/// In a checkpoint, the files beside the weights; and the key of its manifest that only a training
/// run writes.
constexpr const char* kStatePrefix = "optimizer/state";
constexpr const char* kOptimizerSteps = "optimizer_steps";

/// Fills what this rank has of the parameters, and the expert biases, from checkpoint.initial_load,
/// a folder that moesh or others wrote, and what LoRA adds from lora.adapter; nothing where these
/// are empty. Throws Error (config) when the folder holds another model.
void load_initial_weights(const config::Config& config, models::Model& model,
                          const checkpoint::Heartbeat& heartbeat = {});

/// The same from a folder that the configuration need not name.
void load_weights(const std::filesystem::path& folder, const config::Config& config,
                  models::Model& model, const checkpoint::Heartbeat& heartbeat);
void load_adapter(const std::filesystem::path& folder, const config::Config& config,
                  models::Model& model, const checkpoint::Heartbeat& heartbeat);

/// Whether a folder is a checkpoint whose expert biases are not all zero and are not among its
/// weights, because the files of its model have no place for them: a program that reads only the
/// weights chooses other experts.
bool keeps_bias_apart(const std::filesystem::path& folder);

}  // namespace moesh::train
