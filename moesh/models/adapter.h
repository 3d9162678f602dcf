#pragma once
// LoRA on a model, and adapters as PEFT has them: which weights their names mean, and how A and B
// lie in adapter_model.safetensors.

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "moesh/formats/adapter_config.h"
#include "moesh/formats/disk.h"
#include "moesh/models/registry.h"
#include "moesh/nn/lora.h"

namespace moesh::models {

/// The LoRA adapter of each weight, by the weight's name in transformers 5:
/// "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.gate_up_proj".
struct Lora {
  struct Target {
    std::int64_t rank;
    double alpha;
    bool operator==(const Target&) const = default;
  };
  std::map<std::string, Target> targets = {};
  bool use_rslora = false;  // alpha / sqrt(rank) and not alpha / rank
  bool zero_b = true;
  double dropout = 0;  // of dense layers, in training

  bool any() const { return !targets.empty(); }
  /// alpha / rank, or alpha / sqrt(rank).
  double scale(const Target& target) const;
  /// The function that a model takes: from the name of a weight to its adapter.
  nn::LoraOf of(const AnyConfig& config) const;
};

/// Whether a parameter of this name is A or B.
bool is_of_lora(const std::string& param);

/// Every weight that LoRA can add to, in the order of the model.
std::vector<std::string> lora_names(const AnyConfig& config);

/// All weights that LoRA can add to: linear layers of attention, MLPs and shared experts, and the
/// routed experts.
inline constexpr const char* kAllLinear = "all-linear";

/// The weights that `targets` names, with the ranks and alphas of `values`. Names are separated by
/// commas. Each is the whole name of a weight, or its end from a dot on, or a regular expression
/// for the whole name. Throws Error (config) if one matches nothing.
Lora find_targets(const AnyConfig& config, const std::string& targets,
                  const formats::AdapterConfig& values);

/// The adapter of a folder. Throws Error (data) if it belongs to another model.
Lora read_adapter(const AnyConfig& config, const std::filesystem::path& folder);

/// A and B by the names that PEFT gives them.
formats::DiskTable adapter_table(const AnyConfig& config, const Lora& lora);
/// The terms that are added to parameters of the model, by their names.
std::map<std::string, formats::LoraTerm> added_to(const AnyConfig& config, const Lora& lora);
/// adapter_config.json, with which PEFT finds the same weights. `base` is the model's folder.
std::string adapter_config_json(const AnyConfig& config, const Lora& lora, const std::string& base);

}  // namespace moesh::models
