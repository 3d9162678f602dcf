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

/// The experts of a layer: parameters name.w1 and name.w3 [E, F, D], name.w2 [E, D, F], with biases
/// name.b1 and so on.
struct LayerExperts {
  std::string name;
  std::int64_t E, F, D;
};
/// A tensor for each expert and part: name.3.gate_proj.weight [F, D], and likewise up and down,
/// under the model's names.
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

// The description of a model whose experts lie differently.
std::vector<formats::DiskTensor> tensors(const MinimaxM2Config& config, const LayerExperts& experts,
                                         formats::ExpertLayout layout);
std::vector<formats::DiskTensor> tensors(const GraniteMoeConfig& config,
                                         const LayerExperts& experts, formats::ExpertLayout layout);
std::vector<formats::DiskTensor> tensors(const MixtralConfig& config, const LayerExperts& experts,
                                         formats::ExpertLayout layout);
std::vector<formats::DiskTensor> tensors(const Llama4Config& config, const LayerExperts& experts,
                                         formats::ExpertLayout layout);
std::vector<formats::DiskTensor> tensors(const GptOssConfig& config, const LayerExperts& experts,
                                         formats::ExpertLayout layout);

}  // namespace moesh::models
