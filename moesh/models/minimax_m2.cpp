#include "moesh/models/configs.h"

#include "moesh/models/config_json.h"

namespace moesh::models {

DecoderPlan MinimaxM2Config::plan() const {
  DecoderPlan plan = grouped_plan(*this, [](nn::GroupedAttentionConfig& attention, std::int64_t) {
    attention.qk_norm = nn::QkNorm::across;
  });
  plan.moe.router = {
      .scoring = nn::Scoring::sigmoid, .balance_softmax = true, .normalize = true, .epsilon = 0};
  plan.mlp_name = "block_sparse_moe";
  plan.experts_on_disk = [](const LayerExperts& x, formats::ExpertLayout layout) {
    return layout == formats::ExpertLayout::per_expert ? one_by_one(x, "w1", "w3", "w2")
                                                       : stacked_out_in(x);
  };
  plan.expert_bias_name = "e_score_correction_bias";
  return plan;
}

ModelFacts MinimaxM2Config::facts() const {
  ModelFacts facts = GroupedDecoderConfig::facts();
  facts.load_balance_coeff = 1e-3, facts.stores_expert_bias = true;
  return facts;
}

ModelKeys MinimaxM2Config::keys() {
  return joined(GroupedDecoderConfig::keys(),
                {{"rotary_dim", &rotary_dim, "width of a head that is rotated", 2}});
}

std::vector<BuiltIn<MinimaxM2Config>> MinimaxM2Config::built_in() {
  MinimaxM2Config tiny;
  tiny.num_layers = 2, tiny.init_std = 0.2, tiny.bias_std = 0.2;

  MinimaxM2Config debug;
  debug.vocab = 2048, debug.dim = 256, debug.num_layers = 6, debug.num_heads = 16,
  debug.num_kv_heads = 4, debug.head_dim = 64, debug.rotary_dim = 32;
  debug.moe_ffn = 256, debug.top_k = 3;

  MinimaxM2Config large = debug;
  large.vocab = 200064, large.dim = 3072, large.num_layers = 62, large.num_heads = 48,
  large.num_kv_heads = 8, large.head_dim = 128, large.rotary_dim = 64;
  large.moe_ffn = 1536, large.num_experts = 256, large.top_k = 8, large.max_sequence = 196608;
  return {{"tiny", tiny}, {"debug", debug}, {"230b-a10b", large}};
}

void MinimaxM2Config::fields(ConfigJson& json) {
  JsonDefaults defaults{.theta = 5e6, .head_dim = 128};
  // The published files have the width that is rotated, not the part.
  json.count("rotary_dim", rotary_dim, 0);
  if (json.reads()) {
    json.count("head_dim", head_dim, defaults.head_dim);
    defaults.rotated =
        rotary_dim == 0 ? 1 : static_cast<double>(rotary_dim) / static_cast<double>(head_dim);
  }
  grouped_fields(json, defaults, *this);
  json.only("scoring_func", {"sigmoid"});
  json.require("use_qk_norm", {true});
  json.require("qk_norm_type", {"per_layer"});
  json.require("use_routing_bias", {true});
  json.require("shared_intermediate_size", {std::int64_t{0}});
  json.require("attn_type_list",
               {JsonList(static_cast<size_t>(num_layers), JsonValue{std::int64_t{1}})});
  json.count("intermediate_size", moe_ffn);
}

}  // namespace moesh::models
