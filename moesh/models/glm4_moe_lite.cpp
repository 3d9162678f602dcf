#include "moesh/models/configs.h"

#include <algorithm>

#include "moesh/models/config_json.h"

namespace moesh::models {

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
