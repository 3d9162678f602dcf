#pragma once
// LoRA adds to a weight the product of two small matrices, and only these are trained.

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "moesh/fsdp/param.h"

namespace moesh::nn {

/// The LoRA adapter of a weight [out, in]: scale B (A x), with A [rank, in] and B [out, rank].
struct LoraConfig {
  std::int64_t rank = 0;
  double scale = 1;    // alpha / rank
  bool zero_b = true;  // B begins with zeros: nothing is added. Else it is random, for comparisons.
  double dropout = 0;  // part of x that is dropped in training; experts have none
};
/// The adapter of the weight of this name, if it has one: "model.layers.0.self_attn.q_proj", and of
/// experts "model.layers.0.mlp.experts.gate_up_proj" (w1 and w3) and "..experts.down_proj" (w2).
using LoraOf = std::function<std::optional<LoraConfig>(const std::string& name)>;
inline std::optional<LoraConfig> no_lora(const std::string& /*name*/) { return std::nullopt; }

inline constexpr const char *kLoraA = ".lora_A.weight", *kLoraB = ".lora_B.weight";
/// Values of A and B before training: as PEFT draws them.
inline Init init_of_a(std::int64_t in, const Init& of_module) {
  return {.kind = Init::Distribution::uniform,
          .scale = 1 / std::sqrt(static_cast<double>(in)),
          .seed = of_module.seed};
}
inline Init init_of_b(const LoraConfig& lora, const Init& of_module) {
  return lora.zero_b ? Init{} : init_of_a(lora.rank, of_module);
}

// Dropout of what goes into LoRA's A. Which numbers are dropped depends on the seed, the layer, the
// number of a token in the run, and the feature: never on the rank, nor on how a step is cut. A
// recompute drops the same.

class Dropout {
 public:
  Dropout(double rate, std::uint64_t seed, const std::string& layer);

  /// [rows.., count] of 0, where a number is dropped, and 1 / (1 - rate), for `count` features from
  /// `first` on of the tokens with these numbers [rows..] (Tokens::numbers).
  at::Tensor factors(const at::Tensor& numbers, std::int64_t first, std::int64_t count,
                     at::ScalarType dtype) const;

 private:
  double rate_;
  std::int64_t of_tokens_, of_features_;  // 32 random bits of the layer each
};

}  // namespace moesh::nn
