#include "moesh/models/minimax_m2.h"

#include "moesh/models/disk.h"

namespace moesh::models {

DecoderPlan MinimaxM2Config::plan() const {
  DecoderPlan plan{.config = *this};
  plan.attention = [c = *this](std::int64_t, const std::string& name, const nn::ModuleOptions& o) {
    nn::GroupedAttentionConfig attention = c.attention();
    attention.qk_norm = nn::QkNorm::across;
    return std::make_unique<nn::GroupedAttention>(attention, name, o);
  };
  plan.moe.router = {.scoring = nn::Scoring::sigmoid, .normalize = true, .epsilon = 0};
  plan.mlp_name = "block_sparse_moe";
  plan.expert_bias_name = "e_score_correction_bias";
  return plan;
}

ModelFacts MinimaxM2Config::facts() const {
  ModelFacts facts = GroupedDecoderConfig::facts();
  facts.load_balance_coeff = 1e-3, facts.stores_expert_bias = true;
  return facts;
}

ModelKeys MinimaxM2Config::keys() {
  ModelKeys all = GroupedDecoderConfig::keys();
  all.push_back({"rotary_dim", &rotary_dim, "width of a head that is rotated", 2});
  return all;
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

void read(const JsonValue& json, MinimaxM2Config& c) {
  // The published files have the width that is rotated, not the part.
  const std::int64_t head_dim = count(json, "head_dim", 128),
                     rotated = count(json, "rotary_dim", head_dim);
  read_grouped(json,
               {.theta = 5e6,
                .head_dim = 128,
                .rotated = static_cast<double>(rotated) / static_cast<double>(head_dim)},
               c);
  require(json, "scoring_func", {"sigmoid"});
  require(json, "use_qk_norm", {true});
  require(json, "qk_norm_type", {"per_layer"});
  require(json, "use_routing_bias", {true});
  require(json, "shared_intermediate_size", {std::int64_t{0}});
  require(json, "attn_type_list",
          {to_list(std::vector<std::int64_t>(static_cast<size_t>(c.num_layers), 1))});
  c.moe_ffn = count(json, "intermediate_size");
}

JsonObject fields(const MinimaxM2Config& c) {
  return joined(grouped_json(c), {{"intermediate_size", {c.moe_ffn}},
                                  {"num_local_experts", {c.num_experts}},
                                  {"rotary_dim", {c.rotary_dim}},
                                  {"scoring_func", {"sigmoid"}}});
}

std::vector<formats::DiskTensor> tensors(const MinimaxM2Config&, const LayerExperts& x,
                                         formats::ExpertLayout layout) {
  return layout == formats::ExpertLayout::per_expert ? one_by_one(x, "w1", "w3", "w2")
                                                     : stacked_out_in(x);
}

}  // namespace moesh::models
