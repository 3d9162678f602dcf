#pragma once
// Models as they lie in folders: config.json, and the table of their tensors. Names and shapes are
// those of the model's own parameters; only the experts lie differently. A model says how in its
// file <name>_disk.cpp.

#include <string>
#include <vector>

#include "moesh/formats/disk.h"
#include "moesh/formats/json.h"
#include "moesh/models/registry.h"

namespace moesh::models {

/// The part of a checkpoint that is a router's expert bias: what the table of a model calls it.
std::string expert_bias_name(const std::string& gate_weight);

/// The configuration that a config.json of transformers 4 or 5 describes; throws Error (data) for a
/// model that moesh does not know, or a variant of it that it cannot compute. `name` is what errors
/// call the text.
AnyConfig config_of(const std::string& config_json, const std::string& name);
formats::ModelOnDisk on_disk(const AnyConfig& config);

/// A key of [model] for which the model's config.json has no place: what is read back is another
/// value than the one that was written.
struct LostKey {
  std::string name;       // "window"
  std::string read_back;  // "0"
};
std::optional<LostKey> lost_key(const AnyConfig& config);

/// The experts of a layer: parameters name.w1 and name.w3 [E, F, D], name.w2 [E, D, F], with biases
/// name.b1 and so on.
struct LayerExperts {
  std::string name;
  std::int64_t E, F, D;
};
/// A tensor for each expert and part: name.3.gate_proj.weight [F, D], and what the model calls up
/// and down.
std::vector<formats::DiskTensor> one_by_one(const LayerExperts& experts, const std::string& gate,
                                            const std::string& up, const std::string& down);
/// name.gate_up_proj [E, 2F, D], gate rows first, and name.down_proj [E, D, F].
std::vector<formats::DiskTensor> stacked_out_in(const LayerExperts& experts);
/// name.gate_up_proj [E, D, 2F], gate half first or interleaved, and name.down_proj [E, F, D].
std::vector<formats::DiskTensor> stacked_in_out(const LayerExperts& experts, bool interleaved);

// What each model says: config.json without the fields that all have, and its experts.
void read(const formats::JsonValue& json, DeepseekV3Config& config);
formats::JsonObject fields(const DeepseekV3Config& config);
std::vector<formats::DiskTensor> tensors(const DeepseekV3Config& config,
                                         const LayerExperts& experts, formats::ExpertLayout layout);
void read(const formats::JsonValue& json, Qwen3MoeConfig& config);
formats::JsonObject fields(const Qwen3MoeConfig& config);
std::vector<formats::DiskTensor> tensors(const Qwen3MoeConfig& config, const LayerExperts& experts,
                                         formats::ExpertLayout layout);
void read(const formats::JsonValue& json, MixtralConfig& config);
formats::JsonObject fields(const MixtralConfig& config);
std::vector<formats::DiskTensor> tensors(const MixtralConfig& config, const LayerExperts& experts,
                                         formats::ExpertLayout layout);
void read(const formats::JsonValue& json, Llama4Config& config);
formats::JsonObject fields(const Llama4Config& config);
std::vector<formats::DiskTensor> tensors(const Llama4Config& config, const LayerExperts& experts,
                                         formats::ExpertLayout layout);
void read(const formats::JsonValue& json, GptOssConfig& config);
formats::JsonObject fields(const GptOssConfig& config);
std::vector<formats::DiskTensor> tensors(const GptOssConfig& config, const LayerExperts& experts,
                                         formats::ExpertLayout layout);

}  // namespace moesh::models
