#include "moesh/models/qwen2_moe.h"

#include <algorithm>

#include "moesh/models/disk.h"

namespace moesh::models {

DecoderPlan Qwen2MoeConfig::plan() const {
  DecoderPlan plan{.config = *this};
  plan.attention = [c = *this](std::int64_t, const std::string& name, const nn::ModuleOptions& o) {
    nn::GroupedAttentionConfig attention = c.attention();
    attention.output_bias = false;
    return std::make_unique<nn::GroupedAttention>(attention, name, o);
  };
  plan.is_moe = [step = sparse_step, dense = mlp_only_layers](std::int64_t layer) {
    return (layer + 1) % step == 0 && std::find(dense.begin(), dense.end(), layer) == dense.end();
  };
  plan.moe.router = {.scoring = nn::Scoring::softmax, .normalize = normalize, .epsilon = 0};
  plan.moe.shared_ffn = shared_ffn;
  plan.moe.shared_name = "shared_expert", plan.moe.shared_gate = "shared_expert_gate";
  plan.ffn = ffn;
  return plan;
}

ModelKeys Qwen2MoeConfig::keys() {
  ModelKeys all = GroupedDecoderConfig::keys();
  all.insert(
      all.end(),
      {{"ffn", &ffn, "width of the dense MLP"},
       {"shared_ffn", &shared_ffn, "width of the shared expert"},
       {"sparse_step", &sparse_step, "one block in this many is a mixture of experts"},
       {"normalize", &normalize, "scale the weights of a token's experts to add up to one"}});
  return all;
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

void read(const JsonValue& json, Qwen2MoeConfig& c) {
  read_grouped(json, {}, c);
  require(json, "use_sliding_window", {false});
  c.attention_bias = flag(json, "qkv_bias", true);
  c.ffn = count(json, "intermediate_size"), c.moe_ffn = count(json, "moe_intermediate_size");
  c.shared_ffn = count(json, "shared_expert_intermediate_size");
  c.sparse_step = count(json, "decoder_sparse_step", 1);
  c.mlp_only_layers = numbers(json, "mlp_only_layers").value_or(std::vector<std::int64_t>{});
  c.normalize = flag(json, "norm_topk_prob", false);
}

JsonObject fields(const Qwen2MoeConfig& c) {
  return joined(grouped_json(c), {{"qkv_bias", {c.attention_bias}},
                                  {"intermediate_size", {c.ffn}},
                                  {"moe_intermediate_size", {c.moe_ffn}},
                                  {"shared_expert_intermediate_size", {c.shared_ffn}},
                                  {"num_experts", {c.num_experts}},
                                  {"decoder_sparse_step", {c.sparse_step}},
                                  {"mlp_only_layers", {to_list(c.mlp_only_layers)}},
                                  {"norm_topk_prob", {c.normalize}},
                                  {"use_sliding_window", {false}}});
}

}  // namespace moesh::models
