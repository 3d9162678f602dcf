#include "moesh/models/qwen3_next.h"

#include <algorithm>

#include "moesh/models/disk.h"

namespace moesh::models {

bool Qwen3NextConfig::has_attention(std::int64_t layer) const {
  if (!full_layers) return (layer + 1) % full_step == 0;
  return std::find(full_layers->begin(), full_layers->end(), layer) != full_layers->end();
}

DecoderPlan Qwen3NextConfig::plan() const {
  DecoderPlan plan = Qwen2MoeConfig::plan();
  plan.norm_weight = nn::NormWeight::zero_centred;
  plan.attention_name = [c = *this](std::int64_t layer) {
    return c.has_attention(layer) ? "self_attn" : "linear_attn";
  };
  plan.attention = [c = *this](std::int64_t layer, const std::string& name,
                               const nn::ModuleOptions& o) -> std::unique_ptr<nn::Attention> {
    if (!c.has_attention(layer))
      return std::make_unique<nn::DeltaNet>(nn::DeltaNetConfig{.dim = c.dim,
                                                               .num_key_heads = c.num_key_heads,
                                                               .num_value_heads = c.num_value_heads,
                                                               .key_dim = c.key_dim,
                                                               .value_dim = c.value_dim,
                                                               .num_taps = c.num_taps,
                                                               .norm_eps = c.norm_eps,
                                                               .most_decay = c.most_decay},
                                            name, o);
    nn::GroupedAttentionConfig attention = c.attention();
    attention.qk_norm = nn::QkNorm::weighted;
    attention.norm_weight = nn::NormWeight::zero_centred;
    attention.output_gate = true;
    return std::make_unique<nn::GroupedAttention>(attention, name, o);
  };
  return plan;
}

ModelKeys Qwen3NextConfig::keys() {
  ModelKeys all = Qwen2MoeConfig::keys();
  all.insert(all.end(),
             {{"num_key_heads", &num_key_heads, "heads of q and k in Gated DeltaNet"},
              {"num_value_heads", &num_value_heads, "heads of v in Gated DeltaNet"},
              {"key_dim", &key_dim, "width of a head of q or k in Gated DeltaNet"},
              {"value_dim", &value_dim, "width of a head of v in Gated DeltaNet"},
              {"num_taps", &num_taps, "tokens that the convolution of Gated DeltaNet sees"},
              {"full_step", &full_step, "one layer in this many has attention"}});
  return all;
}

ModelFacts Qwen3NextConfig::facts() const {
  ModelFacts facts = Qwen2MoeConfig::facts();
  facts.num_key_heads = num_key_heads;
  return facts;
}

std::optional<BrokenRule> Qwen3NextConfig::broken_rule() const {
  if (num_value_heads % num_key_heads != 0)
    return BrokenRule{
        {"num_key_heads", "num_value_heads"},
        detail::concat(", which is not divisible by it; set model.num_key_heads to one of ",
                       divisors(num_value_heads))};
  return Qwen2MoeConfig::broken_rule();
}

std::vector<BuiltIn<Qwen3NextConfig>> Qwen3NextConfig::built_in() {
  Qwen3NextConfig tiny;
  tiny.mlp_only_layers = {0}, tiny.full_step = 2;
  tiny.init_std = 0.2, tiny.most_decay = 1;  // so that a state lasts for some tokens

  Qwen3NextConfig debug;
  debug.vocab = 2048, debug.dim = 256, debug.num_layers = 8, debug.num_heads = 8,
  debug.num_kv_heads = 2, debug.head_dim = 64, debug.rotary_dim = 16;
  debug.num_key_heads = 4, debug.num_value_heads = 8, debug.key_dim = 32, debug.value_dim = 32;
  debug.ffn = 640, debug.moe_ffn = 64, debug.shared_ffn = 64, debug.num_experts = 32,
  debug.top_k = 4;

  Qwen3NextConfig published = debug;
  published.vocab = 151936, published.dim = 2048, published.num_layers = 48,
  published.num_heads = 16, published.head_dim = 256, published.rotary_dim = 64;
  published.num_key_heads = 16, published.num_value_heads = 32, published.key_dim = 128,
  published.value_dim = 128;
  published.ffn = 5120, published.moe_ffn = 512, published.shared_ffn = 512,
  published.num_experts = 512, published.top_k = 10;
  published.rope.theta = 1e7, published.max_sequence = 262144;
  return {{"tiny", tiny}, {"debug", debug}, {"80b-a3b", published}};
}

void read(const JsonValue& json, Qwen3NextConfig& c) {
  read_grouped(json, {.head_dim = 256, .rotated = 0.25}, c);
  c.attention_bias = flag(json, "attention_bias", false);
  c.ffn = count(json, "intermediate_size", 5632);
  c.moe_ffn = count(json, "moe_intermediate_size", 512);
  c.shared_ffn = count(json, "shared_expert_intermediate_size", 512);
  c.sparse_step = count(json, "decoder_sparse_step", 1);
  c.mlp_only_layers = numbers(json, "mlp_only_layers").value_or(std::vector<std::int64_t>{});
  c.normalize = flag(json, "norm_topk_prob", true);
  c.num_key_heads = count(json, "linear_num_key_heads", 16);
  c.num_value_heads = count(json, "linear_num_value_heads", 32);
  c.key_dim = count(json, "linear_key_head_dim", 128);
  c.value_dim = count(json, "linear_value_head_dim", 128);
  c.num_taps = count(json, "linear_conv_kernel_dim", 4);
  c.full_step = count(json, "full_attention_interval", 4);
  const auto types = field(json, "layer_types");
  if (!types) return;
  c.full_layers.emplace();
  const auto& list = types->as_list("layer_types");
  MOESH_CHECK(std::ssize(list) == c.num_layers, ErrorKind::data, "layer_types has ", list.size(),
              " entries, and num_hidden_layers is ", c.num_layers);
  bool is_regular = true;
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string type = list[static_cast<std::size_t>(i)].as_text("layer_types");
    MOESH_CHECK(type == "full_attention" || type == "linear_attention", ErrorKind::data,
                "layer_types has '", type, "'; moesh computes full_attention and linear_attention");
    if (type == "full_attention") c.full_layers->push_back(i);
    is_regular = is_regular && (type == "full_attention") == ((i + 1) % c.full_step == 0);
  }
  if (is_regular) c.full_layers.reset();
}

JsonObject fields(const Qwen3NextConfig& c) {
  JsonList types;
  for (std::int64_t i = 0; i < c.num_layers; ++i)
    types.emplace_back(c.has_attention(i) ? "full_attention" : "linear_attention");
  return joined(grouped_json(c), {{"attention_bias", {c.attention_bias}},
                                  {"intermediate_size", {c.ffn}},
                                  {"moe_intermediate_size", {c.moe_ffn}},
                                  {"shared_expert_intermediate_size", {c.shared_ffn}},
                                  {"num_experts", {c.num_experts}},
                                  {"decoder_sparse_step", {c.sparse_step}},
                                  {"mlp_only_layers", {to_list(c.mlp_only_layers)}},
                                  {"norm_topk_prob", {c.normalize}},
                                  {"linear_num_key_heads", {c.num_key_heads}},
                                  {"linear_num_value_heads", {c.num_value_heads}},
                                  {"linear_key_head_dim", {c.key_dim}},
                                  {"linear_value_head_dim", {c.value_dim}},
                                  {"linear_conv_kernel_dim", {c.num_taps}},
                                  {"full_attention_interval", {c.full_step}},
                                  {"layer_types", {types}}});
}

}  // namespace moesh::models
