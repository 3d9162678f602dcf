#include "moesh/models/configs.h"

#include "moesh/models/config_json.h"

namespace moesh::models {

DecoderPlan GraniteMoeConfig::plan() const {
  DecoderPlan plan = grouped_plan(
      *this, [scale = attention_multiplier](nn::GroupedAttentionConfig& attention, std::int64_t) {
        attention.scale = scale;
      });
  plan.moe.router = {.scoring = nn::Scoring::softmax_chosen};
  plan.moe.router_name = "router.layer";
  plan.mlp_name = "block_sparse_moe";
  plan.embedding_scale = embedding_multiplier;
  plan.residual_scale = residual_multiplier;
  plan.logits_scale = 1 / logits_scaling;
  plan.experts_on_disk = [](const LayerExperts& x, formats::ExpertLayout) {
    auto all = stacked_out_in(x);
    const std::string layer = x.name.substr(0, x.name.rfind('.'));  // without "experts"
    all.at(0).name = layer + ".input_linear.weight";
    all.at(1).name = layer + ".output_linear.weight";
    return all;
  };
  return plan;
}

ModelKeys GraniteMoeConfig::keys() {
  constexpr double kLeast = 1e-6;
  return joined(
      GroupedDecoderConfig::keys(),
      {{"embedding_multiplier", &embedding_multiplier, "factor on the embedding", kLeast},
       {"attention_multiplier", &attention_multiplier, "factor on the scores of attention", kLeast},
       {"residual_multiplier", &residual_multiplier, "factor on what a block adds to the stream",
        kLeast},
       {"logits_scaling", &logits_scaling, "divisor of the logits", kLeast}});
}

std::vector<BuiltIn<GraniteMoeConfig>> GraniteMoeConfig::built_in() {
  GraniteMoeConfig tiny;
  tiny.num_layers = 2, tiny.init_std = 0.2, tiny.bias_std = 0.2;
  tiny.embedding_multiplier = 3, tiny.attention_multiplier = 0.25, tiny.residual_multiplier = 0.6,
  tiny.logits_scaling = 2;

  GraniteMoeConfig debug;
  debug.vocab = 2048, debug.dim = 256, debug.num_layers = 6, debug.num_heads = 4,
  debug.num_kv_heads = 2, debug.head_dim = 64;
  debug.moe_ffn = 256, debug.top_k = 3, debug.tie_embeddings = true;
  debug.embedding_multiplier = 12, debug.attention_multiplier = 0.015625,
  debug.residual_multiplier = 0.22, debug.logits_scaling = 6;

  GraniteMoeConfig small = debug;
  small.vocab = 49155, small.dim = 1024, small.num_layers = 24, small.num_heads = 16,
  small.num_kv_heads = 8;
  small.moe_ffn = 512, small.num_experts = 32, small.top_k = 8;

  GraniteMoeConfig large = small;
  large.dim = 1536, large.num_layers = 32, large.num_heads = 24, large.num_experts = 40;
  return {{"tiny", tiny}, {"debug", debug}, {"1b-a400m", small}, {"3b-a800m", large}};
}

void GraniteMoeConfig::fields(ConfigJson& json) {
  grouped_fields(json, {}, *this);
  json.flag("attention_bias", attention_bias, false);
  json.count("intermediate_size", moe_ffn);
  const auto factor = [&](const char* key, double& value) { json.number(key, value, 1, 1e-6); };
  factor("embedding_multiplier", embedding_multiplier);
  factor("attention_multiplier", attention_multiplier);
  factor("residual_multiplier", residual_multiplier);
  factor("logits_scaling", logits_scaling);
}

}  // namespace moesh::models
