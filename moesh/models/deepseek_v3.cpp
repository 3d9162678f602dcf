// B batch, L tokens of this cp rank, D model, h heads of this tp rank

#include <ATen/ATen.h>

#include <cmath>

#include "moesh/models/config_json.h"
#include "moesh/models/configs.h"
#include "moesh/nn/attention.h"
#include "moesh/nn/norm.h"

namespace moesh::models {
namespace {

using nn::Full;
using nn::Heads;
using nn::Sum;
using nn::Tokens;

/// The first n features of each token, and the rest. Backward puts the gradients of both side by
/// side in one pass; those of two slices it would add.
std::pair<Full, Full> split_features(const Full& x, std::int64_t n) {
  const auto parts = local(x).split_with_sizes({n, local(x).size(-1) - n}, -1);
  const auto part = [&](size_t i) {
    return map_rows([&](const at::Tensor&) { return parts[i]; }, x);
  };
  return {part(0), part(1)};
}

/// Multi-head latent attention: keys and values come from a small latent, and one rotated key is
/// shared by all heads.
class Mla final : public nn::Attention {
 public:
  Mla(const DeepseekV3Config& c, const std::string& name, const nn::ModuleOptions& o)
      : num_heads_(c.num_heads),
        nope_(c.qk_nope_dim),
        rope_dim_(c.qk_rope_dim),
        v_dim_(c.v_dim),
        latent_(c.kv_lora_rank),
        rope_(c.rope),
        rope_tables_(o.rope_tables) {
    MOESH_CHECK(num_heads_ % current_mesh().size(tp) == 0, ErrorKind::config,
                "attention: num_heads = ", num_heads_,
                " is not divisible by tp = ", current_mesh().size(tp),
                "; choose a tp that divides the heads");
    const std::int64_t qk = nope_ + rope_dim_;
    rope_.dim = rope_dim_;
    options_.scale = std::pow(static_cast<double>(qk), -0.5) * rope_.attention_factor();
    if (c.q_lora_rank > 0) {
      q_a_ = nn::uncut(name + ".q_a_proj", c.q_lora_rank, c.dim, o);
      q_norm_.emplace(name + ".q_a_layernorm", c.q_lora_rank, 1e-6, o);
      q_ = nn::column(name + ".q_b_proj", num_heads_ * qk, c.q_lora_rank, o);
    } else {
      q_ = nn::column(name + ".q_proj", num_heads_ * qk, c.dim, o);
    }
    kv_a_ = nn::uncut(name + ".kv_a_proj_with_mqa", latent_ + rope_dim_, c.dim, o);
    kv_norm_ = nn::RmsNorm(name + ".kv_a_layernorm", latent_, 1e-6, o);
    // Each cp rank has a part of the gradient of the keys and values that it sees.
    kv_b_ =
        nn::column(name + ".kv_b_proj", num_heads_ * (nope_ + v_dim_), latent_, o.without_float8());
    o_ = nn::row(name + ".o_proj", c.dim, num_heads_ * v_dim_, o);
    for (auto* up : {&q_, &kv_b_}) up->stored().spec.num_heads = num_heads_;
  }

  Sum operator()(const Full& x_BLD, const Tokens& tokens, nn::KvCache* kv_cache,
                 nn::MaxLogits* logits) const override {
    const auto rotation =
        nn::rope_of(*rope_tables_, rope_, tokens, x_BLD).last_features(rope_.interleaved);
    const auto rotated = [&](const at::Tensor& t) { return nn::rotate(t, rotation); };
    const auto turned_queries = [&](const at::Tensor& t) {
      return nn::rotate(t, rotation, kernels::Argument::consumed);
    };

    const at::Tensor numbers = tokens.span_numbers();
    const auto queries = [&]() -> Heads {
      const auto q_in = q_a_ ? (*q_norm_)((*q_a_)(x_BLD, numbers)) : x_BLD;
      return map_heads(turned_queries, nn::split_heads(q_(q_in, numbers), nope_ + rope_dim_));
    };
    const auto [latent, shared_key] = split_features(kv_a_(x_BLD, numbers), latent_);
    const Full turned = map_rows(
        [&](const at::Tensor& t) { return rotated(t.unsqueeze(2)).squeeze(2); }, shared_key);
    if (kv_cache) {
      const Full both =
          map_rows([](const at::Tensor& a, const at::Tensor& b) { return at::cat({a, b}, -1); },
                   kv_norm_(latent), turned);
      const Full& latents = kv_cache->add(nn::all_positions(both, tokens));
      const Heads y =
          nn::attend_latents(queries(), latents, kv_b_.whole(), nope_, tokens, options_, *kv_cache);
      return o_(nn::merge_heads(y), numbers);
    }
    // Between cp ranks travels the latent, not the keys and values of all heads that come of it,
    // while queries are made.
    auto moving_latent = nn::start_seen_positions(kv_norm_(latent), tokens, options_),
         moving_key = nn::start_seen_positions(turned, tokens, options_);
    const Heads q = queries();
    const Full seen_latent = moving_latent.wait(), seen_key = moving_key.wait();
    // Dropout of a latent is the same on every cp rank that sees it.
    const auto both = kv_b_(seen_latent, nn::seen_numbers(tokens, options_));
    const auto [k, v] = nn::latent_heads(nn::split_heads(both, nope_ + v_dim_), seen_key, nope_);
    if (logits) logits->see(q, k, tokens, options_);
    const Heads y = nn::attend(q, k, v, {}, tokens, options_);
    return o_(nn::merge_heads(y), numbers);
  }

  // The rotated key is that of all heads, and stays.
  std::vector<nn::LogitRows> logit_rows() override {
    const std::int64_t of_query = nope_ + rope_dim_;
    return {{&q_.stored(), of_query, 0, nope_, 0.5},
            {&q_.stored(), of_query, nope_, rope_dim_, 1},
            {&kv_b_.stored(), nope_ + v_dim_, 0, nope_, 0.5}};
  }

  void each_param(const std::function<void(Stored&)>& f) override {
    const auto visit = [&](auto& w) { f(w.stored()); };
    if (q_a_) q_a_->each_param(visit), q_norm_->each_param(visit);
    q_.each_param(visit), kv_a_.each_param(visit), kv_norm_.each_param(visit);
    kv_b_.each_param(visit), o_.each_param(visit);
  }

  double flops(std::int64_t sequence) const override {
    return 6.0 * static_cast<double>(num_heads_ * (nope_ + rope_dim_ + v_dim_)) *
           nn::mean_visible(sequence, options_);
  }
  std::optional<nn::AttentionOptions> sees() const override { return options_; }

 private:
  std::int64_t num_heads_, nope_, rope_dim_, v_dim_, latent_;
  nn::RopeConfig rope_;
  std::shared_ptr<nn::RopeTables> rope_tables_;
  nn::AttentionOptions options_;
  std::optional<nn::UncutWeight> q_a_;
  std::optional<nn::RmsNorm> q_norm_;
  nn::ColumnWeight q_;
  nn::UncutWeight kv_a_;
  nn::RmsNorm kv_norm_;
  nn::ColumnWeight kv_b_;
  nn::RowWeight o_;
};

}  // namespace

DecoderPlan DeepseekV3Config::plan() const {
  DecoderPlan plan{.config = *this};
  plan.attention = [c = *this](std::int64_t, const std::string& name, const nn::ModuleOptions& o) {
    return std::make_unique<Mla>(c, name, o);
  };
  plan.published = [](const Stored& w) -> std::optional<kernels::Quantization> {
    const bool is_linear = w.storage == efsdp || w.spec.name.ends_with("_proj.weight") ||
                           w.spec.name.ends_with("_proj_with_mqa.weight");
    return is_linear ? std::optional(kernels::Quantization{}) : std::nullopt;
  };
  add_to(plan);
  return plan;
}

ModelFacts DeepseekV3Config::facts() const {
  ModelFacts facts = DecoderConfig::facts();
  facts.sends_latents = true;
  add_to(facts);
  return facts;
}

std::optional<BrokenRule> DeepseekV3Config::broken_rule() const {
  if (auto broken = not_in_pairs({{"qk_rope_dim", qk_rope_dim}})) return broken;
  if (auto broken = normed_alone({{"q_lora_rank", q_lora_rank}, {"kv_lora_rank", kv_lora_rank}}))
    return broken;
  // Before the groups: what a wrong top_k is told must not be undone by the number of experts.
  if (const auto broken = DecoderConfig::broken_rule()) return broken;
  return broken_moe_rule(*this);
}

ModelKeys DeepseekV3Config::keys() {
  return joined(joined(DecoderConfig::keys(), moe_keys()),
                {
                    {"q_lora_rank", &q_lora_rank, "rank of the query projection; 0: full rank", 0},
                    {"kv_lora_rank", &kv_lora_rank, "rank of the latent for keys and values"},
                    {"qk_nope_dim", &qk_nope_dim, "width of a head that is not rotated"},
                    {"qk_rope_dim", &qk_rope_dim, "width of a head that is rotated"},
                    {"v_dim", &v_dim, "width of the values of a head"},
                });
}

std::vector<BuiltIn<DeepseekV3Config>> DeepseekV3Config::built_in() {
  DeepseekV3Config tiny;
  tiny.num_groups = 2, tiny.top_groups = 1, tiny.q_lora_rank = 12, tiny.init_std = 0.2;
  tiny.rope.interleaved = true;

  DeepseekV3Config debug;
  debug.vocab = 2048, debug.dim = 256, debug.num_layers = 6, debug.num_heads = 16;
  debug.ffn = 1024, debug.moe_ffn = 256, debug.num_experts = 8, debug.num_shared = 2,
  debug.top_k = 3;
  debug.kv_lora_rank = 512, debug.qk_nope_dim = 128, debug.qk_rope_dim = 64, debug.v_dim = 128;
  debug.rope.interleaved = true;

  DeepseekV3Config lite = debug;
  lite.vocab = 102400, lite.dim = 2048, lite.num_layers = 27, lite.max_sequence = 163840;
  lite.ffn = 10944, lite.moe_ffn = 1408, lite.num_experts = 64, lite.top_k = 6;
  lite.rope.factor = 40, lite.rope.mscale = 0.707, lite.rope.mscale_all_dim = 0.707;

  DeepseekV3Config large = lite;
  large.vocab = 129280, large.dim = 7168, large.num_layers = 61, large.num_dense_layers = 3,
  large.num_heads = 128;
  large.ffn = 18432, large.moe_ffn = 2048, large.num_experts = 256, large.num_shared = 1,
  large.top_k = 8;
  large.q_lora_rank = 1536, large.num_groups = 8, large.top_groups = 4, large.routed_scale = 2.5;
  large.rope.mscale = 1, large.rope.mscale_all_dim = 1;

  DeepseekV3Config moonlight = debug;
  moonlight.vocab = 163840, moonlight.dim = 2048, moonlight.num_layers = 27;
  moonlight.ffn = 11264, moonlight.moe_ffn = 1408, moonlight.num_experts = 64, moonlight.top_k = 6;
  moonlight.routed_scale = 2.446, moonlight.norm_eps = 1e-5, moonlight.rope.theta = 50000;
  moonlight.max_sequence = 8192;

  DeepseekV3Config kimi = large;
  kimi.vocab = 163840, kimi.num_dense_layers = 1, kimi.num_heads = 64, kimi.num_experts = 384;
  kimi.num_groups = kimi.top_groups = 1, kimi.routed_scale = 2.827, kimi.max_sequence = 131072;
  kimi.rope.theta = 50000, kimi.rope.factor = 32, kimi.rope.beta_fast = 1;
  return {{"tiny", tiny},  {"debug", debug},         {"16b", lite},
          {"671b", large}, {"moonlight", moonlight}, {"kimi-k2", kimi}};
}

void DeepseekV3Config::fields(ConfigJson& json) {
  decoder_fields(json, {.num_experts = "n_routed_experts"}, *this);
  json.only("attention_bias", {false});
  json.only("num_key_value_heads", {num_heads});
  json.count("moe_intermediate_size", moe_ffn);
  json.count_or_null("q_lora_rank", q_lora_rank);
  json.count("kv_lora_rank", kv_lora_rank);
  json.count("qk_nope_head_dim", qk_nope_dim), json.count("qk_rope_head_dim", qk_rope_dim);
  json.count("v_head_dim", v_dim);
  // Absent fields mean what they mean in transformers.
  if (json.reads()) num_groups = 8, top_groups = 4, routed_scale = 2.5;
  moe_fields(json, num_layers, *this);
  json.flag("rope_interleave", rope.interleaved, true);
}

void DeepseekMoe::add_to(DecoderPlan& plan) const {
  plan.is_moe = [first = num_dense_layers](std::int64_t layer) { return layer >= first; };
  plan.moe.router = {.scoring = nn::Scoring::sigmoid,
                     .num_groups = num_groups,
                     .top_groups = top_groups,
                     .normalize = normalize,
                     .scale = routed_scale};
  plan.moe.shared_ffn = plan.config.moe_ffn * num_shared;
  plan.ffn = ffn;
  plan.num_mtp_layers = num_mtp_layers;
}

void DeepseekMoe::add_to(ModelFacts& facts) {
  facts.load_balance_coeff = 1e-3, facts.balance_loss_weight = 1e-4;
  facts.stores_expert_bias = true;
}

std::optional<BrokenRule> DeepseekMoe::broken_moe_rule(const DecoderConfig& config) const {
  const std::int64_t num_layers = config.num_layers, num_experts = config.num_experts,
                     top_k = config.top_k;
  if (num_dense_layers > num_layers)
    return BrokenRule{{"num_dense_layers", "num_layers"},
                      detail::concat("; set model.num_dense_layers to ", num_layers, " or less")};
  const std::int64_t of_group = num_experts / num_groups;
  if (num_groups > 1 && (num_experts % num_groups != 0 || of_group < 2)) {
    std::vector<std::int64_t> working = divisors(num_experts);
    if (working.size() > 1) working.pop_back();  // one expert each
    return BrokenRule{{"num_groups", "num_experts"},
                      detail::concat(", and groups must be equal, with two experts or more; set "
                                     "model.num_groups to one of ",
                                     working)};
  }
  if (top_groups > num_groups)
    return BrokenRule{{"top_groups", "num_groups"},
                      detail::concat("; set model.top_groups to ", num_groups, " or less")};
  if (top_k > top_groups * of_group)
    return BrokenRule{{"top_k", "top_groups", "num_groups", "num_experts"},
                      detail::concat(", so a token may use ", top_groups * of_group,
                                     " experts; set model.top_k to ", top_groups * of_group,
                                     " or less, or model.top_groups to ",
                                     (top_k + of_group - 1) / of_group, " or more")};
  return std::nullopt;
}

ModelKeys DeepseekMoe::moe_keys() {
  return {
      {"num_dense_layers", &num_dense_layers,
       "number of blocks, at the beginning, with a dense MLP", 0},
      {"ffn", &ffn, "width of the dense MLP"},
      {"num_shared", &num_shared, "number of shared experts", 0},
      {"num_groups", &num_groups, "number of groups of experts, for node-limited routing"},
      {"top_groups", &top_groups, "number of groups that a token may use"},
      {"normalize", &normalize, "scale the weights of a token's experts to add up to one"},
      {"routed_scale", &routed_scale, "factor on the weights of routed experts"},
      {"num_mtp_layers", &num_mtp_layers,
       "number of layers for multi-token prediction: layer k predicts the token k + 1 ahead", 0,
       64},
  };
}

}  // namespace moesh::models
