#pragma once
// MiniMax-M2: grouped-query attention that rotates half of each head, with one norm over all heads
// of q and one over those of k; sigmoid routing with an expert bias, no shared expert.

#include <string>
#include <vector>

#include "moesh/models/config.h"
#include "moesh/models/decoder.h"

namespace moesh::models {

struct MinimaxM2Config : GroupedDecoderConfig {
  static constexpr const char* kName = "minimax_m2";
  static constexpr const char *kModelType = "minimax_m2",
                              *kArchitecture = "MiniMaxM2ForCausalLM";  // in config.json

  MinimaxM2Config() { rope.theta = 5e6, rotary_dim = 4; }

  /// "tiny", "debug", "230b-a10b".
  static std::vector<BuiltIn<MinimaxM2Config>> built_in();
  static MinimaxM2Config named(const std::string& size) {
    return models::built_in<MinimaxM2Config>(size);
  }

  ModelKeys keys();
  ModelFacts facts() const;
  DecoderPlan plan() const;
};

}  // namespace moesh::models
