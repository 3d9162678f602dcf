#pragma once
// OLMoE: grouped-query attention with one norm over all heads of q, and one over those of k;
// softmax routing, no shared expert.

#include <string>
#include <vector>

#include "moesh/models/config.h"
#include "moesh/models/decoder.h"

namespace moesh::models {

struct OlmoeConfig : GroupedDecoderConfig {
  static constexpr const char* kName = "olmoe";
  static constexpr const char *kModelType = "olmoe",
                              *kArchitecture = "OlmoeForCausalLM";  // in config.json

  OlmoeConfig() { norm_eps = 1e-5, balance_loss = 0.01; }

  double clip = 0;         // q, k and v are cut off at +-clip; 0: they are not
  bool normalize = false;  // weights of a token add up to one

  /// "tiny", "debug", "1b-7b".
  static std::vector<BuiltIn<OlmoeConfig>> built_in();
  static OlmoeConfig named(const std::string& size) { return models::built_in<OlmoeConfig>(size); }

  ModelKeys keys();
  DecoderPlan plan() const;
};

}  // namespace moesh::models
