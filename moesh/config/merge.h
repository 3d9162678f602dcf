#pragma once
// Makes a Config in one pass: settings from the weakest to the strongest, the model that they name,
// its keys, every rule. The result is closed.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "moesh/config/config.h"

namespace moesh::config {

/// A value that an option or a key of the model gets, and from where.
struct Setting {
  std::string name;  // "training.steps"
  Value value;
  Origin origin;
  bool is_text = false;  // from the command line: to be read as whatever the option takes
};
/// Later ones override earlier ones.
using Settings = std::vector<Setting>;

/// A model that is not built in, and where it comes from.
struct RequestedModel {
  models::AnyConfig architecture;
  std::string origin;
  std::string folder = {};  // whose config.json says all of it
};

/// The settings of a command line: --config FILE, --section.key=value (or --section.key value, or
/// --section.key for true), and the short forms --mesh, --model, --steps, --dtype, --device,
/// --max-minutes. The settings of the file come first, wherever it is named.
Settings read_arguments(const std::vector<std::string>& args);

/// The same for a program that has values instead of words: options by their names, or the short
/// forms (mesh, model, steps, ...) and config. Messages call the program `origin`.
Settings read_values(const std::vector<std::pair<std::string, Value>>& values,
                     const std::string& origin);

/// The mesh as settings: every degree of it.
Settings mesh_settings(const MeshShape& shape, const std::string& origin);
/// As --mesh takes it: "dp_shard=2,tp=2".
std::string mesh_argument(const MeshShape& shape);

/// The settings over the defaults of the options. Unknown names and values of a wrong type or out
/// of range throw Error (config), which names where they were given and the nearest known option.
/// `model`, if given, replaces the built-in configuration that model.name and model.size name.
Config merged(const Settings& settings, const std::optional<RequestedModel>& model = std::nullopt);

/// The configuration with these settings over its own; by the same rules.
Config changed(const Config& config, const Settings& settings,
               const std::optional<RequestedModel>& model = std::nullopt);

/// `defaults` are those of a command, where they differ from those of the options. model.folder
/// (--model hf:FOLDER), or checkpoint.initial_load where no other setting is of [model], names the
/// folder of a Hugging Face model: its config.json says what the model is, keys of [model] override
/// that, and with model.folder the run starts from its weights.
Config load_config(const std::vector<std::string>& args, const Settings& defaults = {});
/// The same of settings that were read already.
Config load_settings(const Settings& settings, const Settings& defaults = {});

// Guesses what a user meant by a name that does not exist.

/// The one among `names` that a user most likely meant by `wrong`: few letters differ, or
/// the key is in another section. Nothing: more than half of the word is wrong.
std::optional<std::string> nearest_name(const std::string& wrong,
                                        const std::vector<std::string>& names);

/// Names that other frameworks (torchtitan, Megatron, transformers, DeepSpeed) have for an option,
/// or that people guess.
struct Guesses {
  std::string answer;  // "--data.sequence_length", "--training.dtype=bfloat16", or a sentence
  std::vector<std::string> names;  // with '_' for '-'; "lora." is every key of that section
};
const std::vector<Guesses>& guesses();

/// The answer for a name, with '-' or '_', whatever section it is in: "--seq-len" is
/// --data.sequence_length, and "--tp" with the value 2 is --mesh tp=2. Nothing: no guess.
std::optional<std::string> answer_to(const std::string& name, const std::string& value);

/// The same for axes of a mesh: "fsdp" is dp_shard.
std::optional<std::string> axis_elsewhere(const std::string& axis);

}  // namespace moesh::config
