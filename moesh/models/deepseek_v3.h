#pragma once
// DeepSeek-V3: multi-head latent attention (MLA), and the mixture of deepseek_moe.h. Kimi K2 and
// Moonlight are the same model in other sizes.

#include <string>
#include <vector>

#include "moesh/models/config.h"
#include "moesh/models/decoder.h"
#include "moesh/models/deepseek_moe.h"

namespace moesh::models {

struct DeepseekV3Config : DecoderConfig, DeepseekMoe {
  static constexpr const char* kName = "deepseek_v3";
  static constexpr const char *kModelType = "deepseek_v3",
                              *kArchitecture = "DeepseekV3ForCausalLM";  // in config.json

  std::int64_t q_lora_rank = 0, kv_lora_rank = 16, qk_nope_dim = 8, qk_rope_dim = 4, v_dim = 8;

  /// "tiny", "debug", "16b" (DeepSeek-V2-Lite's shape with V3's router), "671b" (DeepSeek-V3),
  /// "moonlight" (Moonlight 16B-A3B), "kimi-k2" (Kimi K2, 1T-A32B).
  static std::vector<BuiltIn<DeepseekV3Config>> built_in();
  static DeepseekV3Config named(const std::string& size) {
    return models::built_in<DeepseekV3Config>(size);
  }

  ModelKeys keys();
  ModelFacts facts() const;
  std::optional<BrokenRule> broken_rule() const;
  DecoderPlan plan() const;
};

}  // namespace moesh::models
