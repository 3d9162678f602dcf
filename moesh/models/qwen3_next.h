#pragma once
// Qwen3-Next: most layers are Gated DeltaNet, the others have grouped-query attention behind an
// output gate; the mixture is that of Qwen2-MoE.

#include <optional>
#include <string>
#include <vector>

#include "moesh/models/qwen2_moe.h"
#include "moesh/nn/delta_net.h"

namespace moesh::models {

struct Qwen3NextConfig : Qwen2MoeConfig {
  Qwen3NextConfig() { normalize = true, rotary_dim = 2; }

  static constexpr const char* kName = "qwen3_next";
  static constexpr const char *kModelType = "qwen3_next",
                              *kArchitecture = "Qwen3NextForCausalLM";  // in config.json

  std::int64_t num_key_heads = 4, num_value_heads = 8;  // of Gated DeltaNet
  std::int64_t key_dim = 8, value_dim = 4;              // of a head
  std::int64_t num_taps = 4;                            // of the convolution
  double most_decay = 16;                               // as in nn::DeltaNetConfig
  std::int64_t full_step = 4;                           // every so many layers one has attention,
  std::optional<std::vector<std::int64_t>> full_layers = {};  // or these have it

  /// "tiny", "debug", "80b-a3b".
  static std::vector<BuiltIn<Qwen3NextConfig>> built_in();
  static Qwen3NextConfig named(const std::string& size) {
    return models::built_in<Qwen3NextConfig>(size);
  }

  bool has_attention(std::int64_t layer) const;

  ModelKeys keys();
  ModelFacts facts() const;
  std::optional<BrokenRule> broken_rule() const;
  DecoderPlan plan() const;
};

}  // namespace moesh::models
