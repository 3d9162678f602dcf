#pragma once
// Qwen3-MoE: grouped-query attention with a norm on every head of q and k, softmax routing, no
// shared expert.

#include <string>
#include <vector>

#include "moesh/models/config.h"
#include "moesh/models/decoder.h"

namespace moesh::models {

struct Qwen3MoeConfig : GroupedDecoderConfig {
  static constexpr const char* kName = "qwen3_moe";
  static constexpr const char *kModelType = "qwen3_moe",
                              *kArchitecture = "Qwen3MoeForCausalLM";  // in config.json

  std::int64_t ffn = 48;                           // of the layers that are not mixtures
  std::int64_t sparse_step = 1;                    // layer i is a mixture if i + 1 divides by it,
  std::vector<std::int64_t> mlp_only_layers = {};  // and it is not among these
  bool normalize = true;                           // weights of a token add up to one

  /// "tiny", "debug", "30b-a3b", "235b-a22b".
  static std::vector<BuiltIn<Qwen3MoeConfig>> built_in();
  static Qwen3MoeConfig named(const std::string& size) {
    return models::built_in<Qwen3MoeConfig>(size);
  }

  ModelKeys keys();
  DecoderPlan plan() const;
};

}  // namespace moesh::models
