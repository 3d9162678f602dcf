#pragma once
// The parts that all models' configurations have in common, as the trainer sees them.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/nn/grouped_attention.h"
#include "moesh/nn/rope.h"

namespace moesh::models {

class ConfigJson;

/// A value of a model's configuration that [model] may set besides name and size.
struct ModelKey {
  std::string name;  // "num_layers"
  std::variant<bool*, std::int64_t*, double*, std::string*> target;
  std::string help = "";
  std::optional<double> least = {};  // of numbers; if not given 1 for whole ones, 0 for real ones
  double most = 1e9;
};
using ModelKeys = std::vector<ModelKey>;
ModelKeys joined(ModelKeys keys, const ModelKeys& more);

/// Facts of a model that the rules of a run need; 0: no limit. Messages call them
/// model.num_heads and so on: model keys have these names.
struct ModelFacts {
  std::int64_t num_layers = 0;
  std::int64_t num_mtp_layers = 0;
  std::int64_t num_heads = 0, num_kv_heads = 0;
  std::int64_t num_key_heads = 0;  // of layers that carry a state along the sequence
  bool sends_latents = false;      // between cp ranks, of which keys and values come there
  std::int64_t num_experts = 0;
  std::int64_t max_sequence = 0;
  std::int64_t vocab_size = 0;
  // Settings that the model was trained with: the step of its expert bias (balance without a loss),
  // the weight of each layer's balance loss, and whether scores multiply what goes into an expert
  // or what comes out of it.
  double load_balance_coeff = 0;
  double balance_loss_weight = 0;
  bool score_before_experts = false;
  bool stores_expert_bias = false;  // its files have a place for the bias

  /// Ranks may split a sequence where no layer carries a state along it.
  bool takes_cp() const { return num_key_heads == 0; }
};

/// The names of a model: --model NAME, and in config.json.
struct ModelNames {
  const char *name, *model_type, *architecture;
};

/// A broken rule of a model's configuration.
struct BrokenRule {
  std::vector<std::string> keys;  // those that it is about, the one to change first
  std::string cure;               // after their values: "; set model.top_k to 8 or less"
};
using NamedSizes = std::vector<std::pair<std::string, std::int64_t>>;
/// The first of these that breaks a rule: a norm of one number is only its sign, of which nothing
/// is learned; and features are rotated in pairs.
std::optional<BrokenRule> normed_alone(const NamedSizes& widths);
std::optional<BrokenRule> not_in_pairs(const NamedSizes& widths);

/// The configuration of every decoder, with the values of the tiny size. A model adds to keys(),
/// facts() and broken_rule(), and defines plan() (decoder.h) and the fields() of its config.json
/// (config_json.h).
struct DecoderConfig {
  std::int64_t vocab = 96, dim = 32, num_layers = 3, num_heads = 8;
  std::int64_t num_experts = 8, top_k = 2;
  std::int64_t moe_ffn = 24;  // width of an expert
  double norm_eps = 1e-6;
  nn::RopeConfig rope;  // its dim follows from the attention
  bool tie_embeddings = false;
  std::int64_t max_sequence = 4096;
  double init_std = 0.02;
  // Standard deviation of initial biases, but for those of a router. Every library begins with
  // zeros; the tiny sizes do not, so that comparisons see what biases do.
  double bias_std = 0;
  double balance_loss = 0;  // router_aux_loss_coef: of one loss for all layers together

  /// Points into this object.
  ModelKeys keys();
  ModelFacts facts() const;
  /// The first broken rule, apart from the ranges of single keys.
  std::optional<BrokenRule> broken_rule() const;
};

/// A decoder with grouped-query attention.
struct GroupedDecoderConfig : DecoderConfig {
  GroupedDecoderConfig() { balance_loss = 1e-3; }  // router_aux_loss_coef of their library

  std::int64_t num_kv_heads = 4, head_dim = 8;
  std::int64_t rotary_dim = 0;  // first features of a head that are rotated; 0: all
  bool attention_bias = false;
  std::int64_t window = 0;  // tokens that a query sees; 0: all

  ModelKeys keys();
  ModelFacts facts() const;
  std::optional<BrokenRule> broken_rule() const;
  /// The facts that follow from these sizes; models add the rest.
  nn::GroupedAttentionConfig attention() const;
};

/// 1, 2, 4 of 4: the values of a number that must divide another one.
std::vector<std::int64_t> divisors(std::int64_t n);

/// A configuration that comes with moesh.
template <class Config>
struct BuiltIn {
  std::string size;
  Config config;
};

/// The one of this size; throws Error (config) that lists them.
template <class Config>
Config built_in(const std::string& size) {
  std::string sizes;
  for (const auto& b : Config::built_in()) {
    if (b.size == size) return b.config;
    sizes += (sizes.empty() ? "" : ", ") + b.size;
  }
  throw Error(ErrorKind::config, detail::concat(Config::kNames.name, " has no size '", size,
                                                "'; it comes as ", sizes));
}

}  // namespace moesh::models
