#pragma once
// The configurations of all models, side by side: the keys of each model besides those of config.h.
// What they do is in the source of each.

#include <optional>
#include <vector>

#include "moesh/models/config.h"
#include "moesh/models/decoder.h"

namespace moesh::models {

/// The mixture of DeepSeek-V3, which other models have as well: first layers dense, then shared
/// experts beside routed ones, node-limited sigmoid routing, and balance by an expert bias. Part of
/// a configuration, beside a DecoderConfig.
struct DeepseekMoe {
  std::int64_t num_dense_layers = 1, ffn = 48;
  std::int64_t num_shared = 1, num_groups = 1, top_groups = 1;
  std::int64_t num_mtp_layers = 0;  // layers behind the last that predict further tokens
  bool normalize = true;
  double routed_scale = 1;

  /// Points into this object.
  ModelKeys moe_keys();
  /// The broken rule of a configuration that keeps the decoder's own rules.
  std::optional<BrokenRule> broken_moe_rule(const DecoderConfig& config) const;
  void add_to(DecoderPlan& plan) const;
  static void add_to(ModelFacts& facts);
};

/// DeepSeek-V3: multi-head latent attention (MLA), and the mixture above. Kimi K2 and
/// Moonlight are the same model in other sizes.
struct DeepseekV3Config : DecoderConfig, DeepseekMoe {
  static constexpr ModelNames kNames{"deepseek_v3", "deepseek_v3", "DeepseekV3ForCausalLM"};

  std::int64_t q_lora_rank = 0, kv_lora_rank = 16, qk_nope_dim = 8, qk_rope_dim = 4, v_dim = 8;

  /// "tiny", "debug", "16b" (DeepSeek-V2-Lite's shape with V3's router), "671b" (DeepSeek-V3),
  /// "moonlight" (Moonlight 16B-A3B), "kimi-k2" (Kimi K2, 1T-A32B).
  static std::vector<BuiltIn<DeepseekV3Config>> built_in();

  ModelKeys keys();
  ModelFacts facts() const;
  std::optional<BrokenRule> broken_rule() const;
  DecoderPlan plan() const;
  void fields(ConfigJson& json);
};

/// GLM-4.5, 4.6 and 4.7: grouped-query attention that rotates half of each head, in some sizes with
/// a norm on every head of q and k, and the mixture of DeepSeek-V3.
/// `attention_bias` is that of q, k and v.
struct Glm4MoeConfig : GroupedDecoderConfig, DeepseekMoe {
  static constexpr ModelNames kNames{"glm4_moe", "glm4_moe", "Glm4MoeForCausalLM"};

  Glm4MoeConfig() { norm_eps = 1e-5, balance_loss = 0, rotary_dim = 4; }

  bool qk_norm = false;

  /// "tiny", "debug", "106b-a12b" (GLM-4.5-Air), "355b-a32b" (GLM-4.5, 4.6 and 4.7).
  static std::vector<BuiltIn<Glm4MoeConfig>> built_in();

  ModelKeys keys();
  ModelFacts facts() const;
  std::optional<BrokenRule> broken_rule() const;
  DecoderPlan plan() const;
  void fields(ConfigJson& json);
};

/// GLM-4.7-Flash: DeepSeek-V3 in another size, with a config.json of its own.
struct Glm4MoeLiteConfig : DeepseekV3Config {
  static constexpr ModelNames kNames{"glm4_moe_lite", "glm4_moe_lite", "Glm4MoeLiteForCausalLM"};

  Glm4MoeLiteConfig() { norm_eps = 1e-5, rope.interleaved = true; }

  /// "tiny", "debug", "30b-a3b" (GLM-4.7-Flash).
  static std::vector<BuiltIn<Glm4MoeLiteConfig>> built_in();
  void fields(ConfigJson& json);
};

/// Mixtral: grouped-query attention, every layer a mixture of few large experts, softmax over all
/// of them and normalised over the chosen.
struct MixtralConfig : GroupedDecoderConfig {
  static constexpr ModelNames kNames{"mixtral", "mixtral", "MixtralForCausalLM"};

  /// "tiny", "debug", "8x7b", "8x22b".
  static std::vector<BuiltIn<MixtralConfig>> built_in();

  DecoderPlan plan() const;
  void fields(ConfigJson& json);
};

/// Parts that both generations of Qwen's mixtures have: grouped-query attention, softmax routing,
/// and layers that are not mixtures.
struct QwenMoeConfig : GroupedDecoderConfig {
  std::int64_t ffn = 48;                           // of the layers that are not mixtures
  std::int64_t sparse_step = 1;                    // layer i is a mixture if i + 1 divides by it,
  std::vector<std::int64_t> mlp_only_layers = {};  // and it is not among these
  bool normalize = true;                           // weights of a token add up to one

  ModelKeys keys();
  /// Adds router and dense layers.
  void add_to(DecoderPlan& plan) const;
};

/// Qwen2-MoE and Qwen1.5-MoE: biases on q, k and v, and a shared expert behind a sigmoid gate of
/// its own.
struct Qwen2MoeConfig : QwenMoeConfig {  // `attention_bias` is that of q, k and v
  static constexpr ModelNames kNames{"qwen2_moe", "qwen2_moe", "Qwen2MoeForCausalLM"};

  Qwen2MoeConfig() { normalize = false; }

  std::int64_t shared_ffn = 40;  // of the shared expert

  /// "tiny", "debug", "a2.7b" (Qwen1.5-MoE), "57b-a14b" (Qwen2).
  static std::vector<BuiltIn<Qwen2MoeConfig>> built_in();

  ModelKeys keys();
  DecoderPlan plan() const;
  void fields(ConfigJson& json);
};

/// Qwen3-MoE: a norm on every head of q and k, no shared expert.
struct Qwen3MoeConfig : QwenMoeConfig {
  static constexpr ModelNames kNames{"qwen3_moe", "qwen3_moe", "Qwen3MoeForCausalLM"};

  /// "tiny", "debug", "30b-a3b", "235b-a22b".
  static std::vector<BuiltIn<Qwen3MoeConfig>> built_in();

  DecoderPlan plan() const;
  void fields(ConfigJson& json);
};

/// Qwen3-Next: most layers are Gated DeltaNet, the others have grouped-query attention behind an
/// output gate; the mixture is that of Qwen2-MoE.
struct Qwen3NextConfig : Qwen2MoeConfig {
  Qwen3NextConfig() { normalize = true, rotary_dim = 2; }

  static constexpr ModelNames kNames{"qwen3_next", "qwen3_next", "Qwen3NextForCausalLM"};

  std::int64_t num_key_heads = 4, num_value_heads = 8;  // of Gated DeltaNet
  std::int64_t key_dim = 8, value_dim = 4;              // of a head
  std::int64_t num_taps = 4;                            // of the convolution
  double most_decay = 16;                               // as in nn::DeltaNetConfig
  std::int64_t full_step = 4;                           // one of this many layers has attention,
  std::optional<std::vector<std::int64_t>> full_layers = {};  // or these have it

  /// "tiny", "debug", "80b-a3b".
  static std::vector<BuiltIn<Qwen3NextConfig>> built_in();

  bool has_attention(std::int64_t layer) const;

  ModelKeys keys();
  ModelFacts facts() const;
  std::optional<BrokenRule> broken_rule() const;
  DecoderPlan plan() const;
  void fields(ConfigJson& json);
};

/// OLMoE: grouped-query attention with one norm over all heads of q, and one over those of k;
/// softmax routing, no shared expert.
struct OlmoeConfig : GroupedDecoderConfig {
  static constexpr ModelNames kNames{"olmoe", "olmoe", "OlmoeForCausalLM"};

  OlmoeConfig() { norm_eps = 1e-5, balance_loss = 0.01; }

  double clip = 0;         // q, k and v are cut off at +-clip; 0: they are not
  bool normalize = false;  // weights of a token add up to one

  /// "tiny", "debug", "1b-7b".
  static std::vector<BuiltIn<OlmoeConfig>> built_in();

  ModelKeys keys();
  DecoderPlan plan() const;
  void fields(ConfigJson& json);
};

/// Llama 4 (text): scores multiply what goes into an expert, one expert a token beside a shared
/// one. Most layers rotate and see their own chunk; every so often one has no positions and sees
/// all, with queries that grow.
struct Llama4Config : GroupedDecoderConfig {
  static constexpr ModelNames kNames{"llama4", "llama4_text", "Llama4ForCausalLM"};

  std::int64_t ffn = 48;      // of the layers that are not mixtures
  std::int64_t moe_step = 1;  // one of this many layers is a mixture,
  std::optional<std::vector<std::int64_t>> moe_layers = {};  // or these are
  std::int64_t nope_step = 4;  // one of this many layers has no positions,
  std::optional<std::vector<std::int64_t>> nope_layers = {};  // or these have none
  std::int64_t chunk = 8192;  // of the layers with positions; 0: none
  bool qk_norm = true;        // of the layers with positions
  double growth = 0.1;        // of the queries of the others; 0: none
  std::int64_t growth_floor = 8192;

  /// "tiny", "debug", "scout" (17B x 16E), "maverick" (17B x 128E).
  static std::vector<BuiltIn<Llama4Config>> built_in();

  bool is_moe(std::int64_t layer) const;
  bool has_positions(std::int64_t layer) const;

  ModelKeys keys();
  DecoderPlan plan() const;
  void fields(ConfigJson& json);
};

/// GPT-OSS: attention with sinks and biases, every other layer in a sliding window; clamped SwiGLU
/// experts with biases; softmax over the chosen logits.
struct GptOssConfig : GroupedDecoderConfig {  // `window` is that of the even layers
  static constexpr ModelNames kNames{"gpt_oss", "gpt_oss", "GptOssForCausalLM"};

  /// "tiny", "debug", "20b", "120b".
  static std::vector<BuiltIn<GptOssConfig>> built_in();

  DecoderPlan plan() const;
  void fields(ConfigJson& json);
};

/// MiniMax-M2: grouped-query attention that rotates half of each head, with one norm over all heads
/// of q and one over those of k; sigmoid routing with an expert bias, no shared expert.
struct MinimaxM2Config : GroupedDecoderConfig {
  static constexpr ModelNames kNames{"minimax_m2", "minimax_m2", "MiniMaxM2ForCausalLM"};

  MinimaxM2Config() { rope.theta = 5e6, rotary_dim = 4; }

  /// "tiny", "debug", "230b-a10b".
  static std::vector<BuiltIn<MinimaxM2Config>> built_in();

  ModelKeys keys();
  ModelFacts facts() const;
  DecoderPlan plan() const;
  void fields(ConfigJson& json);
};

/// Granite MoE: grouped-query attention and small experts, softmax over the chosen logits. Factors
/// on the embedding, the scores of attention, what blocks add to the stream, and the logits.
struct GraniteMoeConfig : GroupedDecoderConfig {
  static constexpr ModelNames kNames{"granitemoe", "granitemoe", "GraniteMoeForCausalLM"};

  double embedding_multiplier = 1, attention_multiplier = 1, residual_multiplier = 1;
  double logits_scaling = 1;  // logits are divided by it

  /// "tiny", "debug", "1b-a400m", "3b-a800m" (Granite 3.0).
  static std::vector<BuiltIn<GraniteMoeConfig>> built_in();

  ModelKeys keys();
  DecoderPlan plan() const;
  void fields(ConfigJson& json);
};

}  // namespace moesh::models
