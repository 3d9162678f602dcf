#include "moesh/models/olmoe.h"

#include "moesh/models/disk.h"

namespace moesh::models {

DecoderPlan OlmoeConfig::plan() const {
  DecoderPlan plan{.config = *this};
  plan.attention = [c = *this](std::int64_t, const std::string& name, const nn::ModuleOptions& o) {
    nn::GroupedAttentionConfig attention = c.attention();
    attention.qk_norm = nn::QkNorm::across;
    attention.clip = c.clip;
    return std::make_unique<nn::GroupedAttention>(attention, name, o);
  };
  plan.moe.router = {.scoring = nn::Scoring::softmax, .normalize = normalize, .epsilon = 0};
  return plan;
}

ModelKeys OlmoeConfig::keys() {
  ModelKeys all = GroupedDecoderConfig::keys();
  all.insert(all.end(), {{"clip", &clip, "largest absolute value of q, k and v; 0: no limit"},
                         {"normalize", &normalize,
                          "scale the weights of a token's experts to add up to one"}});
  return all;
}

std::vector<BuiltIn<OlmoeConfig>> OlmoeConfig::built_in() {
  OlmoeConfig tiny;
  tiny.head_dim = 4, tiny.num_layers = 2, tiny.clip = 1;
  tiny.init_std = 0.2, tiny.bias_std = 0.2;

  OlmoeConfig debug;
  debug.vocab = 2048, debug.dim = 256, debug.num_layers = 6, debug.num_heads = 4,
  debug.num_kv_heads = 4, debug.head_dim = 64;
  debug.moe_ffn = 256, debug.top_k = 3;

  OlmoeConfig small = debug;
  small.vocab = 50304, small.dim = 2048, small.num_layers = 16, small.num_heads = 16,
  small.num_kv_heads = 16, small.head_dim = 128;
  small.moe_ffn = 1024, small.num_experts = 64, small.top_k = 8;
  return {{"tiny", tiny}, {"debug", debug}, {"1b-7b", small}};
}

void read(const JsonValue& json, OlmoeConfig& c) {
  read_grouped(json, {.norm_eps = 1e-5}, c);
  // Its norms are as wide as the model.
  require(json, "head_dim", {c.dim / c.num_heads});
  c.attention_bias = flag(json, "attention_bias", false);
  c.moe_ffn = count(json, "intermediate_size");
  c.clip = number(json, "clip_qkv", 0);
  c.normalize = flag(json, "norm_topk_prob", false);
}

JsonObject fields(const OlmoeConfig& c) {
  JsonObject all =
      joined(grouped_json(c), {{"attention_bias", {c.attention_bias}},
                               {"intermediate_size", {c.moe_ffn}},
                               {"num_experts", {c.num_experts}},
                               {"clip_qkv", c.clip > 0 ? JsonValue{c.clip} : JsonValue{}},
                               {"norm_topk_prob", {c.normalize}}});
  std::erase_if(all, [](const auto& f) { return f.first == "head_dim"; });
  return all;
}

}  // namespace moesh::models
