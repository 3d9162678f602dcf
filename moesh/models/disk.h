#pragma once
// Models as they lie in folders: config.json, and the table of their tensors. Names and shapes are
// those of the model's own parameters; only the experts lie differently.

#include <optional>
#include <string>
#include <vector>

#include "moesh/formats/disk.h"
#include "moesh/formats/json.h"
#include "moesh/models/config.h"
#include "moesh/models/registry.h"

namespace moesh::models {

/// The name of a router's expert bias in the table of a model.
std::string expert_bias_name(const std::string& gate_weight);

/// The name in transformers 5 of a parameter, or of a weight, by its name here. Mixtral and
/// MiniMax-M2 have another one there; Granite keeps the name that the three have here.
std::string library_name(const AnyConfig& config, const std::string& name);

/// The configuration that a config.json of transformers 4 or 5 describes; throws Error (data) for a
/// model that moesh does not know, or a variant that it cannot compute. Errors call the text
/// `name`.
AnyConfig config_of(const std::string& config_json, const std::string& name);
formats::ModelOnDisk on_disk(const AnyConfig& config);

/// A key of [model] for which the model's config.json has no place: another value would be read
/// back than was written.
struct LostKey {
  std::string name;       // "window"
  std::string read_back;  // "0"
};
std::optional<LostKey> lost_key(const AnyConfig& config);

}  // namespace moesh::models
