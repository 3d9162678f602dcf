#include "moesh/models/glm4_moe.h"

#include "moesh/models/disk.h"

namespace moesh::models {

DecoderPlan Glm4MoeConfig::plan() const {
  DecoderPlan plan{.config = *this};
  plan.attention = [c = *this](std::int64_t, const std::string& name, const nn::ModuleOptions& o) {
    nn::GroupedAttentionConfig attention = c.attention();
    attention.output_bias = false;
    if (c.qk_norm) attention.qk_norm = nn::QkNorm::weighted;
    return std::make_unique<nn::GroupedAttention>(attention, name, o);
  };
  add_to(plan);
  return plan;
}

ModelFacts Glm4MoeConfig::facts() const {
  ModelFacts facts = GroupedDecoderConfig::facts();
  add_to(facts);
  return facts;
}

std::optional<BrokenRule> Glm4MoeConfig::broken_rule() const {
  if (const auto broken = GroupedDecoderConfig::broken_rule()) return broken;
  return broken_moe_rule(*this);
}

ModelKeys Glm4MoeConfig::keys() {
  ModelKeys all = GroupedDecoderConfig::keys();
  const ModelKeys of_moe = moe_keys();
  all.insert(all.end(), of_moe.begin(), of_moe.end());
  all.insert(all.end(), {{"rotary_dim", &rotary_dim, "width of a head that is rotated", 2},
                         {"qk_norm", &qk_norm, "normalise every head of q and k"}});
  return all;
}

std::vector<BuiltIn<Glm4MoeConfig>> Glm4MoeConfig::built_in() {
  Glm4MoeConfig tiny;
  tiny.attention_bias = true, tiny.qk_norm = true, tiny.routed_scale = 2.5;
  tiny.init_std = 0.2, tiny.bias_std = 0.2;

  Glm4MoeConfig debug;
  debug.vocab = 2048, debug.dim = 256, debug.num_layers = 6, debug.num_heads = 16,
  debug.num_kv_heads = 4, debug.head_dim = 64, debug.rotary_dim = 32, debug.attention_bias = true;
  debug.ffn = 1024, debug.moe_ffn = 256, debug.top_k = 3;

  Glm4MoeConfig air = debug;
  air.vocab = 151552, air.dim = 4096, air.num_layers = 46, air.num_heads = 96, air.num_kv_heads = 8,
  air.head_dim = 128, air.rotary_dim = 64;
  air.ffn = 10944, air.moe_ffn = 1408, air.num_experts = 128, air.top_k = 8;
  air.rope.theta = 1e6, air.max_sequence = 131072;

  Glm4MoeConfig large = air;
  large.dim = 5120, large.num_layers = 92, large.num_dense_layers = 3, large.qk_norm = true;
  large.ffn = 12288, large.moe_ffn = 1536, large.num_experts = 160, large.routed_scale = 2.5;
  large.max_sequence = 202752;
  return {{"tiny", tiny}, {"debug", debug}, {"106b-a12b", air}, {"355b-a32b", large}};
}

void read(const JsonValue& json, Glm4MoeConfig& c) {
  read_grouped(json, {.norm_eps = 1e-5, .rotated = 0.5}, c);
  c.attention_bias = flag(json, "attention_bias", false);
  c.qk_norm = flag(json, "use_qk_norm", false);
  c.moe_ffn = count(json, "moe_intermediate_size");
  read_moe(json, c.num_layers, c);
}

JsonObject fields(const Glm4MoeConfig& c) {
  return joined(joined(grouped_json(c), moe_json(c)), {{"moe_intermediate_size", {c.moe_ffn}},
                                                       {"n_routed_experts", {c.num_experts}},
                                                       {"attention_bias", {c.attention_bias}},
                                                       {"use_qk_norm", {c.qk_norm}}});
}

}  // namespace moesh::models
