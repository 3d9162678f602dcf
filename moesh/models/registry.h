#pragma once
// All models. A new one is a configuration with its names, built_in(), keys(), facts(), plan() and
// fields(), and its place in AnyConfig.

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "moesh/models/configs.h"

namespace moesh::models {

using AnyConfig =
    std::variant<DeepseekV3Config, Qwen3MoeConfig, MixtralConfig, Llama4Config, GptOssConfig,
                 Qwen2MoeConfig, OlmoeConfig, Glm4MoeConfig, Glm4MoeLiteConfig, MinimaxM2Config,
                 GraniteMoeConfig, Qwen3NextConfig>;

/// f.operator()<Config>() for each of them.
template <class Fn>
void each_model(Fn f) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    (f.template operator()<std::variant_alternative_t<i, AnyConfig>>(), ...);
  }(std::make_index_sequence<std::variant_size_v<AnyConfig>>());
}

/// In the order of AnyConfig.
std::vector<std::string> model_names();
/// The built-in sizes of a model; throws Error (config) for an unknown model.
std::vector<std::string> model_sizes(const std::string& name);
AnyConfig built_in(const std::string& name, const std::string& size);

std::string name(const AnyConfig& config);
/// Points into the configuration.
ModelKeys keys(AnyConfig& config);
ModelFacts facts(const AnyConfig& config);
/// The first rule of its keys that the configuration breaks.
std::optional<BrokenRule> broken_rule(const AnyConfig& config);
/// What the attention of each layer sees, those of multi-token prediction included.
std::vector<std::optional<nn::AttentionOptions>> attention_options(const AnyConfig& config);
/// FLOPs of a token, forward and backward, at this sequence length: of each layer, and of the head.
struct FlopsOfParts {
  std::vector<double> layers;
  double head = 0;
};
FlopsOfParts flops_of_parts(const AnyConfig& config, std::int64_t sequence);
/// By the names of parameters, those that are quantized in the files the model is published in.
std::map<std::string, kernels::Quantization> published_quantization(const AnyConfig& config);
/// The names of the parameters that are written in float8: projections and experts.
std::set<std::string> float8_params(const AnyConfig& config);
/// On the current mesh. Throws Error (config) where a rule is broken.
std::unique_ptr<Model> make_model(const AnyConfig& config, const ModelOptions& options);

}  // namespace moesh::models
