#pragma once
// All models. A new one is a configuration with kName, built_in(), keys(), facts() and plan(), and its place in AnyConfig.

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "moesh/models/deepseek_v3.h"
#include "moesh/models/gpt_oss.h"
#include "moesh/models/llama4.h"
#include "moesh/models/mixtral.h"
#include "moesh/models/qwen3_moe.h"

namespace moesh::models {

using AnyConfig = std::variant<DeepseekV3Config, Qwen3MoeConfig, MixtralConfig, Llama4Config, GptOssConfig>;

/// In the order of AnyConfig.
std::vector<std::string> model_names();
/// The built-in sizes of a model; throws Error (config) when there is no such model.
std::vector<std::string> model_sizes(const std::string& name);
AnyConfig built_in(const std::string& name, const std::string& size);

std::string name(const AnyConfig& config);
/// Points into the configuration.
ModelKeys keys(AnyConfig& config);
ModelFacts facts(const AnyConfig& config);
/// On the current mesh.
std::unique_ptr<Model> make_model(const AnyConfig& config, const ModelOptions& options);

}  // namespace moesh::models
