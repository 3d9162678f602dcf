#pragma once
// Granite MoE: grouped-query attention and small experts, softmax over the chosen logits. Factors
// on the embedding, the scores of attention, what blocks add to the stream, and the logits.

#include <string>
#include <vector>

#include "moesh/models/config.h"
#include "moesh/models/decoder.h"

namespace moesh::models {

struct GraniteMoeConfig : GroupedDecoderConfig {
  static constexpr const char* kName = "granitemoe";
  static constexpr const char *kModelType = "granitemoe",
                              *kArchitecture = "GraniteMoeForCausalLM";  // in config.json

  double embedding_multiplier = 1, attention_multiplier = 1, residual_multiplier = 1;
  double logits_scaling = 1;  // logits are divided by it

  /// "tiny", "debug", "1b-a400m", "3b-a800m" (Granite 3.0).
  static std::vector<BuiltIn<GraniteMoeConfig>> built_in();
  static GraniteMoeConfig named(const std::string& size) {
    return models::built_in<GraniteMoeConfig>(size);
  }

  ModelKeys keys();
  DecoderPlan plan() const;
};

}  // namespace moesh::models
