#pragma once
// GPT-OSS: attention with sinks and biases, every other layer in a sliding window; clamped SwiGLU
// experts with biases; softmax over the chosen logits.

#include <string>
#include <vector>

#include "moesh/models/config.h"
#include "moesh/models/decoder.h"

namespace moesh::models {

struct GptOssConfig : GroupedDecoderConfig {  // `window` is that of the even layers
  static constexpr const char* kName = "gpt_oss";
  static constexpr const char *kModelType = "gpt_oss",
                              *kArchitecture = "GptOssForCausalLM";  // in config.json

  /// "tiny", "debug", "20b", "120b".
  static std::vector<BuiltIn<GptOssConfig>> built_in();
  static GptOssConfig named(const std::string& size) {
    return models::built_in<GptOssConfig>(size);
  }

  DecoderPlan plan() const;
};

}  // namespace moesh::models
