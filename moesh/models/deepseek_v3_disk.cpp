#include "moesh/models/disk.h"
#include "moesh/models/disk_json.h"

namespace moesh::models {

void read(const JsonValue& json, DeepseekV3Config& c) {
  read_decoder(json, {}, c);
  require(json, "attention_bias", {false});
  require(json, "scoring_func", {"sigmoid"});
  require(json, "topk_method", {"noaux_tc"});
  require(json, "moe_layer_freq", {std::int64_t{1}});
  require(json, "num_key_value_heads", {c.num_heads});
  c.num_dense_layers =
      json.at("first_k_dense_replace", "config.json").as_int("first_k_dense_replace");
  MOESH_CHECK(c.num_dense_layers >= 0 && c.num_dense_layers <= c.num_layers, ErrorKind::data,
              "first_k_dense_replace is ", c.num_dense_layers,
              " of num_hidden_layers = ", c.num_layers);
  c.ffn = count(json, "intermediate_size"), c.moe_ffn = count(json, "moe_intermediate_size");
  c.q_lora_rank = field(json, "q_lora_rank") ? count(json, "q_lora_rank") : 0;
  c.kv_lora_rank = count(json, "kv_lora_rank");
  c.qk_nope_dim = count(json, "qk_nope_head_dim"), c.qk_rope_dim = count(json, "qk_rope_head_dim");
  c.v_dim = count(json, "v_head_dim");
  const auto shared = field(json, "n_shared_experts");
  c.num_shared = shared ? shared->as_int("n_shared_experts") : 0;
  // What is left out is what transformers takes it for.
  c.num_groups = count(json, "n_group", 8), c.top_groups = count(json, "topk_group", 4);
  c.normalize = flag(json, "norm_topk_prob", true);
  c.routed_scale = number(json, "routed_scaling_factor", 2.5);
  c.rope.interleaved = flag(json, "rope_interleave", true);
}

JsonObject fields(const DeepseekV3Config& c) {
  const JsonValue q_lora = c.q_lora_rank > 0 ? JsonValue{c.q_lora_rank} : JsonValue{};
  return joined(decoder_json(c), {{"intermediate_size", {c.ffn}},
                                  {"moe_intermediate_size", {c.moe_ffn}},
                                  {"first_k_dense_replace", {c.num_dense_layers}},
                                  {"num_key_value_heads", {c.num_heads}},
                                  {"q_lora_rank", q_lora},
                                  {"kv_lora_rank", {c.kv_lora_rank}},
                                  {"qk_nope_head_dim", {c.qk_nope_dim}},
                                  {"qk_rope_head_dim", {c.qk_rope_dim}},
                                  {"v_head_dim", {c.v_dim}},
                                  {"n_routed_experts", {c.num_experts}},
                                  {"n_shared_experts", {c.num_shared}},
                                  {"n_group", {c.num_groups}},
                                  {"topk_group", {c.top_groups}},
                                  {"norm_topk_prob", {c.normalize}},
                                  {"routed_scaling_factor", {c.routed_scale}},
                                  {"scoring_func", {"sigmoid"}},
                                  {"topk_method", {"noaux_tc"}},
                                  {"rope_interleave", {c.rope.interleaved}},
                                  {"attention_bias", {false}}});
}

std::vector<formats::DiskTensor> tensors(const DeepseekV3Config&, const LayerExperts& x,
                                         formats::ExpertLayout layout) {
  return layout == formats::ExpertLayout::per_expert
             ? one_by_one(x, "gate_proj", "up_proj", "down_proj")
             : stacked_out_in(x);
}

}  // namespace moesh::models
