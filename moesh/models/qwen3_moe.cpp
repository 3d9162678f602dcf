#include "moesh/models/qwen3_moe.h"

#include <algorithm>

#include "moesh/models/disk.h"

namespace moesh::models {

DecoderPlan Qwen3MoeConfig::plan() const {
  DecoderPlan plan{.config = *this};
  plan.attention = [c = *this](std::int64_t, const std::string& name, const nn::ModuleOptions& o) {
    nn::GroupedAttentionConfig attention = c.attention();
    attention.qk_norm = nn::QkNorm::weighted;
    return std::make_unique<nn::GroupedAttention>(attention, name, o);
  };
  plan.is_moe = [step = sparse_step, dense = mlp_only_layers](std::int64_t layer) {
    return (layer + 1) % step == 0 && std::find(dense.begin(), dense.end(), layer) == dense.end();
  };
  plan.moe.router = {.scoring = nn::Scoring::softmax, .normalize = normalize, .epsilon = 0};
  plan.ffn = ffn;
  return plan;
}

ModelKeys Qwen3MoeConfig::keys() {
  ModelKeys all = GroupedDecoderConfig::keys();
  all.insert(
      all.end(),
      {{"ffn", &ffn, "width of the dense MLP"},
       {"sparse_step", &sparse_step, "one block in this many is a mixture of experts"},
       {"normalize", &normalize, "scale the weights of a token's experts to add up to one"}});
  return all;
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

void read(const JsonValue& json, Qwen3MoeConfig& c) {
  read_grouped(json, {}, c);
  c.attention_bias = flag(json, "attention_bias", false);
  c.ffn = count(json, "intermediate_size"), c.moe_ffn = count(json, "moe_intermediate_size");
  c.sparse_step = count(json, "decoder_sparse_step", 1);
  c.mlp_only_layers = numbers(json, "mlp_only_layers").value_or(std::vector<std::int64_t>{});
  c.normalize = flag(json, "norm_topk_prob", false);
  c.window = flag(json, "use_sliding_window", false) && field(json, "sliding_window")
                 ? count(json, "sliding_window")
                 : 0;
}

JsonObject fields(const Qwen3MoeConfig& c) {
  const JsonValue window = c.window > 0 ? JsonValue{c.window} : JsonValue{};
  return joined(grouped_json(c), {{"attention_bias", {c.attention_bias}},
                                  {"intermediate_size", {c.ffn}},
                                  {"moe_intermediate_size", {c.moe_ffn}},
                                  {"num_experts", {c.num_experts}},
                                  {"decoder_sparse_step", {c.sparse_step}},
                                  {"mlp_only_layers", {to_list(c.mlp_only_layers)}},
                                  {"norm_topk_prob", {c.normalize}},
                                  {"use_sliding_window", {c.window > 0}},
                                  {"sliding_window", window}});
}

}  // namespace moesh::models
