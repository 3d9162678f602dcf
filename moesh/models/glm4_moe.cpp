#include <algorithm>

#include "moesh/models/config_json.h"
#include "moesh/models/configs.h"

namespace moesh::models {

DecoderPlan Glm4MoeConfig::plan() const {
  DecoderPlan plan = grouped_plan(
      *this, [has_norm = qk_norm](nn::GroupedAttentionConfig& attention, std::int64_t) {
        attention.output_bias = false;
        if (has_norm) attention.qk_norm = nn::QkNorm::weighted;
      });
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

std::vector<BuiltIn<Glm4MoeLiteConfig>> Glm4MoeLiteConfig::built_in() {
  Glm4MoeLiteConfig tiny;
  tiny.q_lora_rank = 12, tiny.routed_scale = 1.8, tiny.init_std = 0.2;

  Glm4MoeLiteConfig debug;
  debug.vocab = 2048, debug.dim = 256, debug.num_layers = 6, debug.num_heads = 4;
  debug.ffn = 1024, debug.moe_ffn = 256, debug.top_k = 3, debug.routed_scale = 1.8;
  debug.q_lora_rank = 96, debug.kv_lora_rank = 64, debug.qk_nope_dim = 48, debug.qk_rope_dim = 16,
  debug.v_dim = 64;

  Glm4MoeLiteConfig flash = debug;
  flash.vocab = 154880, flash.dim = 2048, flash.num_layers = 47, flash.num_heads = 20;
  flash.ffn = 10240, flash.moe_ffn = 1536, flash.num_experts = 64, flash.top_k = 4;
  flash.q_lora_rank = 768, flash.kv_lora_rank = 512, flash.qk_nope_dim = 192,
  flash.qk_rope_dim = 64, flash.v_dim = 256;
  flash.rope.theta = 1e6, flash.max_sequence = 202752;
  return {{"tiny", tiny}, {"debug", debug}, {"30b-a3b", flash}};
}

void Glm4MoeLiteConfig::fields(ConfigJson& json) {
  if (!json.reads()) {
    DeepseekV3Config::fields(json);
    JsonList kinds;
    for (std::int64_t i = 0; i < num_layers; ++i)
      kinds.emplace_back(i < num_dense_layers ? "dense" : "sparse");
    return json.write("mlp_layer_types", {kinds});
  }
  JsonValue filled = json.from();
  auto& all = std::get<JsonObject>(filled.value);
  const auto set = [&](const std::string& key, JsonValue value) {
    std::erase_if(all, [&](const auto& f) { return f.first == key; });
    all.emplace_back(key, std::move(value));
  };
  // Where DeepSeek-V3 counts its dense layers, this one has a list of the kinds of all.
  if (const auto kinds = json.find("mlp_layer_types")) {
    const JsonList& list = kinds->as_list("mlp_layer_types");
    const auto first = std::find(list.begin(), list.end(), JsonValue{"sparse"});
    MOESH_CHECK(
        std::all_of(first, list.end(), [](const auto& k) { return k == JsonValue{"sparse"}; }),
        ErrorKind::data,
        "mlp_layer_types has dense layers behind sparse ones; moesh "
        "computes models whose dense layers are the first ones");
    set("first_k_dense_replace", {std::int64_t{first - list.begin()}});
  } else if (!json.find("first_k_dense_replace")) {
    set("first_k_dense_replace", {std::int64_t{1}});
  }
  // Absent fields mean what they mean in transformers.
  const auto fallback = [&](const std::string& key, const JsonValue& value) {
    if (!json.find(key)) set(key, value);
  };
  fallback("rms_norm_eps", {1e-5}), fallback("routed_scaling_factor", {1.8});
  fallback("n_group", {std::int64_t{1}}), fallback("topk_group", {std::int64_t{1}});
  fallback("n_shared_experts", {std::int64_t{1}});
  ConfigJson of_base(filled);
  DeepseekV3Config::fields(of_base);
}

}  // namespace moesh::models
