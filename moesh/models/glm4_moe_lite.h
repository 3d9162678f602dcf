#pragma once
// GLM-4.7-Flash: DeepSeek-V3 in another size, with a config.json of its own.

#include "moesh/models/deepseek_v3.h"

namespace moesh::models {

struct Glm4MoeLiteConfig : DeepseekV3Config {
  static constexpr const char* kName = "glm4_moe_lite";
  static constexpr const char *kModelType = "glm4_moe_lite",
                              *kArchitecture = "Glm4MoeLiteForCausalLM";  // in config.json

  Glm4MoeLiteConfig() { norm_eps = 1e-5, rope.interleaved = true; }

  /// "tiny", "debug", "30b-a3b" (GLM-4.7-Flash).
  static std::vector<BuiltIn<Glm4MoeLiteConfig>> built_in();
  static Glm4MoeLiteConfig named(const std::string& size) {
    return models::built_in<Glm4MoeLiteConfig>(size);
  }
};

}  // namespace moesh::models
