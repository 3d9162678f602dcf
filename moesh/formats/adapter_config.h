#pragma once
// adapter_config.json: how PEFT describes what a LoRA adapter adds to a model.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moesh::formats {

inline constexpr const char* kAdapterConfigFile = "adapter_config.json";
inline constexpr const char* kAdapterFile = "adapter_model.safetensors";
inline constexpr const char* kAdapterPrefix = "base_model.model.";  // of every tensor

/// Whether a pattern of rank_pattern or alpha_pattern matches a name, or its end from a dot on.
bool matches_end(const std::string& pattern, const std::string& name);

struct AdapterConfig {
  std::int64_t rank = 8;
  double alpha = 8;
  bool use_rslora = false;
  double dropout = 0;
  // Other ranks and alphas, by a regular expression (matches_end).
  std::vector<std::pair<std::string, std::int64_t>> rank_pattern;
  std::vector<std::pair<std::string, double>> alpha_pattern;
  std::vector<std::string> target_modules;     // names of linear layers, or their ends
  std::vector<std::string> target_parameters;  // those of parameters: experts
  std::string base_model;                      // the folder or the name of the model; may be empty

  /// The first pattern that matches decides.
  std::int64_t rank_of(const std::string& name) const;
  double alpha_of(const std::string& name) const;
};

/// Throws Error (data) for what moesh does not compute, such as DoRA; `name` is what it calls the
/// text. Which weights have tensors is said by these: target_modules are not read.
AdapterConfig parse_adapter_config(std::string_view text, const std::string& name);
std::string write_adapter_config(const AdapterConfig& config);

}  // namespace moesh::formats
