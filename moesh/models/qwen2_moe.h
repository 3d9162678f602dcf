#pragma once
// Qwen2-MoE and Qwen1.5-MoE: grouped-query attention with biases on q, k and v, softmax routing,
// and a shared expert behind a sigmoid gate of its own.

#include <string>
#include <vector>

#include "moesh/models/config.h"
#include "moesh/models/decoder.h"

namespace moesh::models {

struct Qwen2MoeConfig : GroupedDecoderConfig {  // `attention_bias` is that of q, k and v
  static constexpr const char* kName = "qwen2_moe";
  static constexpr const char *kModelType = "qwen2_moe",
                              *kArchitecture = "Qwen2MoeForCausalLM";  // in config.json

  std::int64_t ffn = 48;                           // of the layers that are not mixtures
  std::int64_t shared_ffn = 40;                    // of the shared expert
  std::int64_t sparse_step = 1;                    // layer i is a mixture if i + 1 divides by it,
  std::vector<std::int64_t> mlp_only_layers = {};  // and it is not among these
  bool normalize = false;                          // weights of a token add up to one

  /// "tiny", "debug", "a2.7b" (Qwen1.5-MoE), "57b-a14b" (Qwen2).
  static std::vector<BuiltIn<Qwen2MoeConfig>> built_in();
  static Qwen2MoeConfig named(const std::string& size) {
    return models::built_in<Qwen2MoeConfig>(size);
  }

  ModelKeys keys();
  DecoderPlan plan() const;
};

}  // namespace moesh::models
