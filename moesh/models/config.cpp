#include "moesh/models/config.h"

#include <algorithm>

#include "moesh/models/decoder.h"

namespace moesh::models {

ModelKeys joined(ModelKeys keys, const ModelKeys& more) {
  keys.insert(keys.end(), more.begin(), more.end());
  return keys;
}

std::optional<BrokenRule> normed_alone(const NamedSizes& widths) {
  for (const auto& [name, width] : widths)
    if (width == 1)
      return BrokenRule{{name},
                        detail::concat(", and the norm of one number is only its sign; set model.",
                                       name, " to 2 or more")};
  return std::nullopt;
}

std::optional<BrokenRule> not_in_pairs(const NamedSizes& widths) {
  for (const auto& [name, width] : widths)
    if (width % 2 != 0)
      return BrokenRule{{name},
                        detail::concat(", and features are rotated in pairs; set model.", name,
                                       " to ", width + 1, " or another even number")};
  return std::nullopt;
}

ModelKeys DecoderConfig::keys() {
  return {
      {"vocab_size", &vocab, "number of tokens in the vocabulary", 2},
      {"dim", &dim, "width of the residual stream"},
      {"num_layers", &num_layers, "number of blocks", 1, 10000},
      {"num_heads", &num_heads, "number of attention heads"},
      {"num_experts", &num_experts, "number of routed experts in a layer"},
      {"top_k", &top_k, "experts that each token uses"},
      {"moe_ffn", &moe_ffn, "width of an expert"},
      {"norm_eps", &norm_eps, "epsilon of the norms", 1e-30},  // else a norm of zeros is NaN
      {"rope_theta", &rope.theta, "base of the rotary frequencies", 2, 1e12},
      {"rope_factor", &rope.factor, "factor by which positions are stretched; 1: not at all", 1},
      {"tie_embeddings", &tie_embeddings, "use the embedding as the output head"},
      {"max_sequence", &max_sequence, "longest sequence that the model takes"},
      {"init_std", &init_std, "standard deviation of the initial weights"},
  };
}

ModelFacts DecoderConfig::facts() const {
  return {.num_layers = num_layers,
          .num_heads = num_heads,
          .num_kv_heads = num_heads,
          .num_experts = num_experts,
          .max_sequence = max_sequence,
          .vocab_size = vocab};
}

std::optional<BrokenRule> DecoderConfig::broken_rule() const {
  if (auto broken = normed_alone({{"dim", dim}})) return broken;
  if (top_k > num_experts)
    return BrokenRule{{"top_k", "num_experts"},
                      detail::concat("; set model.top_k to ", num_experts, " or less")};
  return std::nullopt;
}

std::vector<std::int64_t> divisors(std::int64_t n) {
  constexpr std::int64_t kMaxTried = 1'000'000;  // of numbers beyond its square some are left out
  std::vector<std::int64_t> all;
  for (std::int64_t d = 1; d <= kMaxTried && d <= n / d; ++d) {
    if (n % d != 0) continue;
    all.push_back(d);
    if (d != n / d) all.push_back(n / d);
  }
  std::sort(all.begin(), all.end());
  return all;
}

ModelKeys GroupedDecoderConfig::keys() {
  return joined(DecoderConfig::keys(),
                {{"num_kv_heads", &num_kv_heads, "number of key and value heads"},
                 {"head_dim", &head_dim, "width of a head"},
                 {"attention_bias", &attention_bias, "add biases to the projections of attention"},
                 {"window", &window, "size of the attention window, in tokens; 0: no window", 0},
                 {"init_bias_std", &bias_std,
                  "standard deviation of the initial biases; 0: they begin at zero"},
                 {"balance_loss", &balance_loss,
                  "weight of the balance loss in the model's own recipe, of all layers "
                  "together"}});
}

ModelFacts GroupedDecoderConfig::facts() const {
  ModelFacts facts = DecoderConfig::facts();
  facts.num_kv_heads = num_kv_heads;
  return facts;
}

std::optional<BrokenRule> GroupedDecoderConfig::broken_rule() const {
  if (num_heads % num_kv_heads != 0)
    return BrokenRule{
        {"num_kv_heads", "num_heads"},
        detail::concat(", which is not divisible by it; set model.num_kv_heads to one of ",
                       divisors(num_heads))};
  if (auto broken = not_in_pairs({{"head_dim", head_dim}})) return broken;
  if (rotary_dim > head_dim || rotary_dim % 2 != 0)
    return BrokenRule{
        {"rotary_dim", "head_dim"},
        detail::concat(", and features of a head are rotated in pairs; set "
                       "model.rotary_dim to ",
                       std::max<std::int64_t>(head_dim / 2 * 2, 2), " or a smaller even number")};
  return DecoderConfig::broken_rule();
}

nn::GroupedAttentionConfig GroupedDecoderConfig::attention() const {
  nn::GroupedAttentionConfig c{.dim = dim,
                               .num_heads = num_heads,
                               .num_kv_heads = num_kv_heads,
                               .head_dim = head_dim,
                               .biases = attention_bias,
                               .output_bias = attention_bias,
                               .norm_eps = norm_eps,
                               .rope = rope,
                               .window = window};
  c.rope->dim = rotary_dim > 0 ? rotary_dim : head_dim;
  return c;
}

DecoderPlan grouped_plan(
    const GroupedDecoderConfig& config,
    const std::function<void(nn::GroupedAttentionConfig&, std::int64_t)>& change) {
  DecoderPlan plan{.config = config};
  plan.attention = [c = config.attention(), change](std::int64_t layer, const std::string& name,
                                                    const nn::ModuleOptions& o) {
    nn::GroupedAttentionConfig of_layer = c;
    if (change) change(of_layer, layer);
    return std::make_unique<nn::GroupedAttention>(of_layer, name, o);
  };
  return plan;
}

}  // namespace moesh::models
