#include "moesh/models/configs.h"

#include "moesh/models/config_json.h"

namespace moesh::models {

DecoderPlan OlmoeConfig::plan() const {
  DecoderPlan plan =
      grouped_plan(*this, [clip = clip](nn::GroupedAttentionConfig& attention, std::int64_t) {
        attention.qk_norm = nn::QkNorm::across;
        attention.clip = clip;
      });
  plan.moe.router = {.scoring = nn::Scoring::softmax, .normalize = normalize, .epsilon = 0};
  return plan;
}

ModelKeys OlmoeConfig::keys() {
  return joined(
      GroupedDecoderConfig::keys(),
      {{"clip", &clip, "largest absolute value of q, k and v; 0: no limit"},
       {"normalize", &normalize, "scale the weights of a token's experts to add up to one"}});
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

void OlmoeConfig::fields(ConfigJson& json) {
  grouped_fields(json, {.norm_eps = 1e-5, .num_experts = "num_experts"}, *this);
  // Its norms are as wide as the model.
  json.require("head_dim", {dim / num_heads});
  std::erase_if(json.written(), [](const auto& f) { return f.first == "head_dim"; });
  json.flag("attention_bias", attention_bias, false);
  json.count("intermediate_size", moe_ffn);
  if (json.reads() || clip > 0)
    json.number("clip_qkv", clip, 0);
  else
    json.write("clip_qkv", {});
  json.flag("norm_topk_prob", normalize, false);
}

}  // namespace moesh::models
