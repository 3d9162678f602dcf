#pragma once
// DeepSeek-V3: multi-head latent attention (MLA), first layers dense, then mixtures of experts with
// shared experts, node-limited sigmoid routing, and balance by an expert bias.

#include <string>
#include <vector>

#include "moesh/models/config.h"
#include "moesh/models/decoder.h"

namespace moesh::models {

struct DeepseekV3Config : DecoderConfig {
  static constexpr const char* kName = "deepseek_v3";
  static constexpr const char *kModelType = "deepseek_v3",
                              *kArchitecture = "DeepseekV3ForCausalLM";  // in config.json

  std::int64_t num_dense_layers = 1, ffn = 48;
  std::int64_t q_lora_rank = 0, kv_lora_rank = 16, qk_nope_dim = 8, qk_rope_dim = 4, v_dim = 8;
  std::int64_t num_shared = 1, num_groups = 1, top_groups = 1;
  bool normalize = true;
  double routed_scale = 1;

  /// "tiny", "debug", "16b" (DeepSeek-V2-Lite's shape with V3's router), "671b" (DeepSeek-V3).
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
