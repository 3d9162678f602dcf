#pragma once
// GLM-4.5, 4.6 and 4.7: grouped-query attention that rotates half of each head, in some sizes with
// a norm on every head of q and k, and the mixture of deepseek_moe.h.

#include <string>
#include <vector>

#include "moesh/models/config.h"
#include "moesh/models/decoder.h"
#include "moesh/models/deepseek_moe.h"

namespace moesh::models {

// `attention_bias` is that of q, k and v.
struct Glm4MoeConfig : GroupedDecoderConfig, DeepseekMoe {
  static constexpr const char* kName = "glm4_moe";
  static constexpr const char *kModelType = "glm4_moe",
                              *kArchitecture = "Glm4MoeForCausalLM";  // in config.json

  Glm4MoeConfig() { norm_eps = 1e-5, balance_loss = 0, rotary_dim = 4; }

  bool qk_norm = false;

  /// "tiny", "debug", "106b-a12b" (GLM-4.5-Air), "355b-a32b" (GLM-4.5, 4.6 and 4.7).
  static std::vector<BuiltIn<Glm4MoeConfig>> built_in();
  static Glm4MoeConfig named(const std::string& size) {
    return models::built_in<Glm4MoeConfig>(size);
  }

  ModelKeys keys();
  ModelFacts facts() const;
  std::optional<BrokenRule> broken_rule() const;
  DecoderPlan plan() const;
};

}  // namespace moesh::models
