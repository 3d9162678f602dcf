#pragma once
// LoRA on a model: which weights it adds to, and how much.

#include <map>
#include <string>

#include "moesh/nn/lora.h"

namespace moesh::models {

/// The LoRA adapter of each weight, by the weight's name in transformers 5:
/// "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.gate_up_proj".
struct Lora {
  struct Target {
    std::int64_t rank;
    double alpha;
    bool operator==(const Target&) const = default;
  };
  std::map<std::string, Target> targets = {};
  bool use_rslora = false;  // alpha / sqrt(rank) and not alpha / rank
  bool zero_b = true;
  double dropout = 0;  // of dense layers, in training

  bool any() const { return !targets.empty(); }
  /// alpha / rank, or alpha / sqrt(rank).
  double scale(const Target& target) const;
  /// For a model that is made: takes the names of its parameters.
  nn::LoraOf of() const;
};

/// The name in transformers 5 of a weight, or of a parameter of LoRA, by its name here: both are
/// the same but for Mixtral.
std::string library_name(const std::string& name);
/// Whether a parameter of this name is A or B.
bool is_of_lora(const std::string& param);

}  // namespace moesh::models
