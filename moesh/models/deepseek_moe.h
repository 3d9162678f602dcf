#pragma once
// The mixture of DeepSeek-V3, which others have taken over: first layers dense, then shared experts
// beside routed ones, node-limited sigmoid routing, and balance by an expert bias.

#include "moesh/models/config.h"
#include "moesh/models/decoder.h"

namespace moesh::models {

/// Part of a configuration, beside a DecoderConfig.
struct DeepseekMoe {
  std::int64_t num_dense_layers = 1, ffn = 48;
  std::int64_t num_shared = 1, num_groups = 1, top_groups = 1;
  std::int64_t num_mtp_layers = 0;  // layers behind the last that predict further tokens
  bool normalize = true;
  double routed_scale = 1;

  /// Points into this object.
  ModelKeys moe_keys();
  /// The broken rule of a configuration that keeps the decoder's own rules.
  std::optional<BrokenRule> broken_moe_rule(const DecoderConfig& config) const;
  void add_to(DecoderPlan& plan) const;
  static void add_to(ModelFacts& facts);
};

}  // namespace moesh::models
