#include "moesh/models/configs.h"

#include <algorithm>

#include "moesh/models/config_json.h"
#include "moesh/nn/delta_net.h"

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
  return joined(Qwen2MoeConfig::keys(),
                {{"num_key_heads", &num_key_heads, "heads of q and k in Gated DeltaNet"},
                 {"num_value_heads", &num_value_heads, "heads of v in Gated DeltaNet"},
                 {"key_dim", &key_dim, "width of a head of q or k in Gated DeltaNet"},
                 {"value_dim", &value_dim, "width of a head of v in Gated DeltaNet"},
                 {"num_taps", &num_taps, "tokens that the convolution of Gated DeltaNet sees"},
                 {"full_step", &full_step, "one layer in this many has attention"}});
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
  if (auto broken = normed_alone({{"key_dim", key_dim}, {"value_dim", value_dim}})) return broken;
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

void Qwen3NextConfig::fields(ConfigJson& json) {
  grouped_fields(json, {.head_dim = 256, .rotated = 0.25, .num_experts = "num_experts"}, *this);
  json.flag("attention_bias", attention_bias, false);
  json.count("intermediate_size", ffn, 5632);
  json.count("moe_intermediate_size", moe_ffn, 512);
  json.count("shared_expert_intermediate_size", shared_ffn, 512);
  json.count("decoder_sparse_step", sparse_step, 1);
  json.list("mlp_only_layers", mlp_only_layers);
  json.flag("norm_topk_prob", normalize, true);
  json.count("linear_num_key_heads", num_key_heads, 16);
  json.count("linear_num_value_heads", num_value_heads, 32);
  json.count("linear_key_head_dim", key_dim, 128);
  json.count("linear_value_head_dim", value_dim, 128);
  json.count("linear_conv_kernel_dim", num_taps, 4);
  json.count("full_attention_interval", full_step, 4);
  if (!json.reads()) {
    JsonList types;
    for (std::int64_t i = 0; i < num_layers; ++i)
      types.emplace_back(has_attention(i) ? "full_attention" : "linear_attention");
    return json.write("layer_types", {types});
  }
  const auto types = json.find("layer_types");
  if (!types) return;
  full_layers.emplace();
  const auto& list = types->as_list("layer_types");
  MOESH_CHECK(std::ssize(list) == num_layers, ErrorKind::data, "layer_types has ", list.size(),
              " entries, and num_hidden_layers is ", num_layers);
  bool is_regular = true;
  for (std::int64_t i = 0; i < num_layers; ++i) {
    const std::string type = list[static_cast<std::size_t>(i)].as_text("layer_types");
    MOESH_CHECK(type == "full_attention" || type == "linear_attention", ErrorKind::data,
                "layer_types has '", type, "'; moesh computes full_attention and linear_attention");
    if (type == "full_attention") full_layers->push_back(i);
    is_regular = is_regular && (type == "full_attention") == ((i + 1) % full_step == 0);
  }
  if (is_regular) full_layers.reset();
}

}  // namespace moesh::models
