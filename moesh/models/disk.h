#pragma once
// Models as they lie in folders: config.json, and the table of their tensors. A model has its own file, <name>_disk.cpp.

#include <string>

#include "moesh/formats/disk.h"
#include "moesh/formats/json.h"
#include "moesh/models/registry.h"

namespace moesh::models {

/// The model which a config.json describes, as transformers 4 and 5 write it; throws Error (data) for a model that moesh does not
/// know, or a variant of it that it cannot compute. `name` is what errors call the text.
AnyConfig config_of(const std::string& config_json, const std::string& name);

/// How a model lies in a folder; throws Error (config) for one that has no table yet.
formats::ModelOnDisk on_disk(const AnyConfig& config);

/// What tables call a router's expert bias, which is no parameter.
std::string expert_bias_name(const std::string& gate_weight);

// One model each.
DeepseekV3Config deepseek_v3_config(const formats::JsonValue& json);
formats::ModelOnDisk deepseek_v3_on_disk(const DeepseekV3Config& config);

}  // namespace moesh::models
