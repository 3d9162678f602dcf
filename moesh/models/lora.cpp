#include "moesh/models/lora.h"

#include <cmath>

namespace moesh::models {

double Lora::scale(const Target& target) const {
  const auto rank = static_cast<double>(target.rank);
  return target.alpha / (use_rslora ? std::sqrt(rank) : rank);
}

nn::LoraOf Lora::of() const {
  if (!any()) return nn::no_lora;
  return [lora = *this](const std::string& name) -> std::optional<nn::LoraConfig> {
    const auto found = lora.targets.find(library_name(name));
    if (found == lora.targets.end()) return std::nullopt;
    return nn::LoraConfig{.rank = found->second.rank,
                          .scale = lora.scale(found->second),
                          .zero_b = lora.zero_b,
                          .dropout = lora.dropout};
  };
}

std::string library_name(const std::string& name) {
  constexpr std::string_view kOld = ".block_sparse_moe.", kNew = ".mlp.";
  const auto found = name.find(kOld);
  return found == std::string::npos ? name : std::string(name).replace(found, kOld.size(), kNew);
}

bool is_of_lora(const std::string& param) {
  return param.ends_with(nn::kLoraA) || param.ends_with(nn::kLoraB);
}

}  // namespace moesh::models
