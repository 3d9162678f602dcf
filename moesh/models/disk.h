#pragma once
// Models as they lie in folders: config.json, and the table of their tensors. A model has its own file, <name>_disk.cpp, and a
// line in disk.cpp.

#include <string>

#include "moesh/formats/disk.h"
#include "moesh/formats/json.h"
#include "moesh/models/deepseek_v3.h"

namespace moesh::models {

/// The part of a checkpoint that is a router's expert bias: what the table of a model calls it.
std::string expert_bias_name(const std::string& gate_weight);

/// What a config.json describes; throws Error (data) for a model that moesh does not know, or a variant of it that it cannot
/// compute. `name` is what errors call the text.
formats::ModelOnDisk model_on_disk(const std::string& config_json, const std::string& name);

/// Reads config.json as transformers 4 and 5 write it.
DeepseekV3Config deepseek_v3_config(const formats::JsonValue& json);
/// `tied`: the folder has no lm_head of its own. What moesh writes always has one.
formats::ModelOnDisk on_disk(const DeepseekV3Config& config, bool tied = false);

}  // namespace moesh::models
