#include <algorithm>

#include "moesh/models/config_json.h"
#include "moesh/models/configs.h"

namespace moesh::models {

void QwenMoeConfig::add_to(DecoderPlan& plan) const {
  plan.is_moe = [step = sparse_step, dense = mlp_only_layers](std::int64_t layer) {
    return (layer + 1) % step == 0 && std::find(dense.begin(), dense.end(), layer) == dense.end();
  };
  plan.moe.router = {.scoring = nn::Scoring::softmax, .normalize = normalize, .epsilon = 0};
  plan.ffn = ffn;
}

ModelKeys QwenMoeConfig::keys() {
  return joined(
      GroupedDecoderConfig::keys(),
      {{"ffn", &ffn, "width of the dense MLP"},
       {"sparse_step", &sparse_step, "one block in this many is a mixture of experts"},
       {"normalize", &normalize, "scale the weights of a token's experts to add up to one"}});
}

DecoderPlan Qwen2MoeConfig::plan() const {
  DecoderPlan plan = grouped_plan(*this, [](nn::GroupedAttentionConfig& attention, std::int64_t) {
    attention.output_bias = false;
  });
  add_to(plan);
  plan.moe.shared_ffn = shared_ffn;
  plan.moe.shared_name = "shared_expert", plan.moe.shared_gate = "shared_expert_gate";
  return plan;
}

ModelKeys Qwen2MoeConfig::keys() {
  return joined(QwenMoeConfig::keys(), {{"shared_ffn", &shared_ffn, "width of the shared expert"}});
}

DecoderPlan Qwen3MoeConfig::plan() const {
  DecoderPlan plan = grouped_plan(*this, [](nn::GroupedAttentionConfig& attention, std::int64_t) {
    attention.qk_norm = nn::QkNorm::weighted;
  });
  add_to(plan);
  return plan;
}

std::vector<BuiltIn<Qwen2MoeConfig>> Qwen2MoeConfig::built_in() {
  Qwen2MoeConfig tiny;
  tiny.mlp_only_layers = {0}, tiny.attention_bias = true;
  tiny.init_std = 0.2, tiny.bias_std = 0.2;

  Qwen2MoeConfig debug;
  debug.vocab = 2048, debug.dim = 256, debug.num_layers = 6, debug.num_heads = 16,
  debug.num_kv_heads = 4, debug.head_dim = 64, debug.attention_bias = true;
  debug.ffn = 1024, debug.moe_ffn = 256, debug.shared_ffn = 1024, debug.top_k = 3;

  Qwen2MoeConfig small = debug;
  small.vocab = 151936, small.dim = 2048, small.num_layers = 24, small.num_kv_heads = 16,
  small.head_dim = 128;
  small.ffn = 5632, small.moe_ffn = 1408, small.shared_ffn = 5632, small.num_experts = 60,
  small.top_k = 4;
  small.rope.theta = 1e6, small.max_sequence = 8192;

  Qwen2MoeConfig large = small;
  large.dim = 3584, large.num_layers = 28, large.num_heads = 28, large.num_kv_heads = 4;
  large.ffn = 18944, large.moe_ffn = 2560, large.shared_ffn = 20480, large.num_experts = 64,
  large.top_k = 8;
  large.max_sequence = 131072;
  return {{"tiny", tiny}, {"debug", debug}, {"a2.7b", small}, {"57b-a14b", large}};
}

void Qwen2MoeConfig::fields(ConfigJson& json) {
  grouped_fields(json, {.num_experts = "num_experts"}, *this);
  json.only("use_sliding_window", {false});
  json.flag("qkv_bias", attention_bias, true);
  json.count("intermediate_size", ffn), json.count("moe_intermediate_size", moe_ffn);
  json.count("shared_expert_intermediate_size", shared_ffn);
  json.count("decoder_sparse_step", sparse_step, 1);
  json.list("mlp_only_layers", mlp_only_layers);
  json.flag("norm_topk_prob", normalize, false);
}

std::vector<BuiltIn<Qwen3MoeConfig>> Qwen3MoeConfig::built_in() {
  Qwen3MoeConfig tiny;
  tiny.mlp_only_layers = {0}, tiny.init_std = 0.2, tiny.bias_std = 0.2;

  Qwen3MoeConfig debug;
  debug.vocab = 2048, debug.dim = 256, debug.num_layers = 6, debug.num_heads = 16,
  debug.num_kv_heads = 4, debug.head_dim = 64;
  debug.ffn = 1024, debug.moe_ffn = 256, debug.top_k = 3;

  Qwen3MoeConfig small;
  small.vocab = 151936, small.dim = 2048, small.num_layers = 48, small.num_heads = 32,
  small.num_kv_heads = 4;
  small.head_dim = 128, small.ffn = 6144, small.moe_ffn = 768, small.num_experts = 128,
  small.top_k = 8;
  small.rope.theta = 1e6, small.max_sequence = 40960;

  Qwen3MoeConfig large = small;
  large.dim = 4096, large.num_layers = 94, large.num_heads = 64, large.ffn = 12288,
  large.moe_ffn = 1536;
  return {{"tiny", tiny}, {"debug", debug}, {"30b-a3b", small}, {"235b-a22b", large}};
}

void Qwen3MoeConfig::fields(ConfigJson& json) {
  grouped_fields(json, {.num_experts = "num_experts"}, *this);
  json.flag("attention_bias", attention_bias, false);
  json.count("intermediate_size", ffn), json.count("moe_intermediate_size", moe_ffn);
  json.count("decoder_sparse_step", sparse_step, 1);
  json.list("mlp_only_layers", mlp_only_layers);
  json.flag("norm_topk_prob", normalize, false);
  bool has_window = window > 0;
  json.flag("use_sliding_window", has_window, false);
  if (json.reads() && !has_window)
    window = 0;
  else
    json.count_or_null("sliding_window", window);
}

}  // namespace moesh::models
