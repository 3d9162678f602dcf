#include "moesh/models/configs.h"

#include "moesh/models/config_json.h"

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
  return joined(joined(GroupedDecoderConfig::keys(), moe_keys()),
                {{"rotary_dim", &rotary_dim, "width of a head that is rotated", 2},
                 {"qk_norm", &qk_norm, "normalise every head of q and k"}});
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

void Glm4MoeConfig::fields(ConfigJson& json) {
  grouped_fields(json, {.norm_eps = 1e-5, .rotated = 0.5, .num_experts = "n_routed_experts"},
                 *this);
  json.flag("attention_bias", attention_bias, false);
  json.flag("use_qk_norm", qk_norm, false);
  json.count("moe_intermediate_size", moe_ffn);
  moe_fields(json, num_layers, *this);
}

}  // namespace moesh::models
