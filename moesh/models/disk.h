#pragma once
// Models as they lie in folders: config.json, and the table of their tensors. Names and shapes are
// those of the model's own parameters; only the experts lie differently. A model says how in its
// file <name>_disk.cpp.

#include <optional>
#include <string>
#include <vector>

#include "moesh/formats/disk.h"
#include "moesh/formats/json.h"
#include "moesh/models/config.h"
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

/// Both layouts under the names that most models have.
template <class Config>
std::vector<formats::DiskTensor> tensors(const Config&, const LayerExperts& experts,
                                         formats::ExpertLayout layout) {
  return layout == formats::ExpertLayout::per_expert
             ? one_by_one(experts, "gate_proj", "up_proj", "down_proj")
             : stacked_out_in(experts);
}

// What each model says: config.json without the fields that all have, and its experts where they
// lie differently.
void read(const formats::JsonValue& json, DeepseekV3Config& config);
formats::JsonObject fields(const DeepseekV3Config& config);
void read(const formats::JsonValue& json, Qwen3MoeConfig& config);
formats::JsonObject fields(const Qwen3MoeConfig& config);
void read(const formats::JsonValue& json, Qwen2MoeConfig& config);
formats::JsonObject fields(const Qwen2MoeConfig& config);
void read(const formats::JsonValue& json, Qwen3NextConfig& config);
formats::JsonObject fields(const Qwen3NextConfig& config);
void read(const formats::JsonValue& json, OlmoeConfig& config);
formats::JsonObject fields(const OlmoeConfig& config);
void read(const formats::JsonValue& json, Glm4MoeConfig& config);
formats::JsonObject fields(const Glm4MoeConfig& config);
void read(const formats::JsonValue& json, Glm4MoeLiteConfig& config);
formats::JsonObject fields(const Glm4MoeLiteConfig& config);
void read(const formats::JsonValue& json, MinimaxM2Config& config);
formats::JsonObject fields(const MinimaxM2Config& config);
std::vector<formats::DiskTensor> tensors(const MinimaxM2Config& config, const LayerExperts& experts,
                                         formats::ExpertLayout layout);
void read(const formats::JsonValue& json, GraniteMoeConfig& config);
formats::JsonObject fields(const GraniteMoeConfig& config);
std::vector<formats::DiskTensor> tensors(const GraniteMoeConfig& config,
                                         const LayerExperts& experts, formats::ExpertLayout layout);
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

// Reading and writing config.json: what all models have in common.

using formats::JsonList;
using formats::JsonObject;
using formats::JsonValue;

/// A field that may be absent or null.
std::optional<JsonValue> field(const JsonValue& json, const std::string& key);
/// A whole number, 1 or more; without `fallback` it must be there.
std::int64_t count(const JsonValue& json, const std::string& key,
                   std::optional<std::int64_t> fallback = {});
/// A number of such a range; `fallback` where it is absent.
double number(const JsonValue& json, const std::string& key, double fallback, double least = 0,
              double most = 1e9);
bool flag(const JsonValue& json, const std::string& key, bool fallback);
std::optional<std::vector<std::int64_t>> numbers(const JsonValue& json, const std::string& key);
JsonList to_list(const std::vector<std::int64_t>& values);
/// Variants that moesh does not compute: better an error than other numbers. An absent field is
/// fine.
void require(const JsonValue& json, const std::string& key, const JsonValue& wanted);

/// What a field stands for where it is absent.
struct JsonDefaults {
  double theta = 10000, norm_eps = 1e-6;
  std::int64_t head_dim = 0;  // 0: the width divided by the heads
  nn::RopeConfig rope = {};   // where nothing is said of scaling
  // Rotated part of each head; not given: the model rotates all of it, and moesh reads nothing
  // else.
  std::optional<double> rotated = {};
};

void read_decoder(const JsonValue& json, const JsonDefaults& defaults, DecoderConfig& config);
void read_grouped(const JsonValue& json, const JsonDefaults& defaults,
                  GroupedDecoderConfig& config);
/// What `moe` has is what an absent field stands for; but there must be a dense width, and the
/// number of dense layers.
void read_moe(const JsonValue& json, std::int64_t num_layers, DeepseekMoe& moe);
JsonObject decoder_json(const DecoderConfig& config);
JsonObject grouped_json(const GroupedDecoderConfig& config);
JsonObject moe_json(const DeepseekMoe& moe);

/// Puts more fields behind those that are there.
JsonObject joined(JsonObject fields, const JsonObject& more);

}  // namespace moesh::models
