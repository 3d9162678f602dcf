#pragma once
// Mixtral: grouped-query attention, every layer a mixture of few large experts, softmax over all of
// them and normalised over the chosen.

#include <string>
#include <vector>

#include "moesh/models/config.h"
#include "moesh/models/decoder.h"

namespace moesh::models {

struct MixtralConfig : GroupedDecoderConfig {
  static constexpr const char* kName = "mixtral";
  static constexpr const char *kModelType = "mixtral",
                              *kArchitecture = "MixtralForCausalLM";  // in config.json

  /// "tiny", "debug", "8x7b", "8x22b".
  static std::vector<BuiltIn<MixtralConfig>> built_in();
  static MixtralConfig named(const std::string& size) {
    return models::built_in<MixtralConfig>(size);
  }

  DecoderPlan plan() const;
};

}  // namespace moesh::models
