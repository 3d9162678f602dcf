#include "moesh/models/disk.h"

#include "moesh/base/error.h"

namespace moesh::models {
namespace {

// Version 5 has rope_parameters, version 4 rope_theta and rope_scaling.
void read_rope(const JsonValue& json, const JsonDefaults& defaults, nn::RopeConfig& r,
               std::int64_t max_sequence) {
  auto rope = field(json, "rope_parameters");
  if (!rope) rope = field(json, "rope_scaling");
  const auto of_rope = [&](const std::string& key) {
    return rope ? field(*rope, key) : std::nullopt;
  };
  auto type = of_rope("rope_type");
  if (!type) type = of_rope("type");
  if (!rope) r = defaults.rope;
  constexpr double kLeastTheta = 2, kMostTheta = 1e12;  // as model.rope_theta
  r.theta = number(json, "rope_theta", defaults.theta, kLeastTheta, kMostTheta);
  if (!rope) return;
  r.theta = number(*rope, "rope_theta", r.theta, kLeastTheta, kMostTheta);
  if (!defaults.rotated) require(*rope, "partial_rotary_factor", {1.0});
  const std::string kind = type ? type->as_text("rope_type") : "default";
  if (kind == "default") return;
  r.factor = number(*rope, "factor", 1, /*least=*/1);
  r.original_length = count(*rope, "original_max_position_embeddings", max_sequence);
  if (kind == "linear") {
    r.scaling = nn::RopeScaling::linear;
  } else if (kind == "llama3") {
    r.scaling = nn::RopeScaling::llama3;
    r.low_turns = number(*rope, "low_freq_factor", 1),
    r.high_turns = number(*rope, "high_freq_factor", 4);
  } else {
    MOESH_CHECK(kind == "yarn", ErrorKind::data, "rope_type is '", kind,
                "'; moesh computes default, linear, llama3 and yarn");
    r.scaling = nn::RopeScaling::yarn;
    r.beta_fast = number(*rope, "beta_fast", 32), r.beta_slow = number(*rope, "beta_slow", 1);
    r.mscale = number(*rope, "mscale", 0), r.mscale_all_dim = number(*rope, "mscale_all_dim", 0);
    r.magnitude = number(*rope, "attention_factor", 0);
    r.truncate = flag(*rope, "truncate", true);
  }
}

// For a message.
std::string in_one_line(const JsonValue& value) {
  std::string text = formats::to_json(value);
  std::erase(text, '\n');
  return text;
}

JsonObject rope_json(const nn::RopeConfig& r) {
  JsonObject rope{{"rope_type", {"default"}}, {"rope_theta", {r.theta}}};
  if (r.factor <= 1) return rope;
  rope.emplace_back("factor", r.factor);
  if (r.scaling == nn::RopeScaling::linear) {
    rope[0].second = {"linear"};
    return rope;
  }
  rope.emplace_back("original_max_position_embeddings", r.original_length);
  if (r.scaling == nn::RopeScaling::llama3) {
    rope[0].second = {"llama3"};
    rope.emplace_back("low_freq_factor", r.low_turns);
    rope.emplace_back("high_freq_factor", r.high_turns);
    return rope;
  }
  rope[0].second = {"yarn"};
  rope.emplace_back("beta_fast", r.beta_fast);
  rope.emplace_back("beta_slow", r.beta_slow);
  if (r.mscale != 0) rope.emplace_back("mscale", r.mscale);
  if (r.mscale_all_dim != 0) rope.emplace_back("mscale_all_dim", r.mscale_all_dim);
  if (r.magnitude != 0) rope.emplace_back("attention_factor", r.magnitude);
  if (!r.truncate) rope.emplace_back("truncate", false);
  return rope;
}

}  // namespace

std::optional<JsonValue> field(const JsonValue& json, const std::string& key) {
  const auto* found = json.find(key);
  return found && !found->is_null() ? std::optional(*found) : std::nullopt;
}

std::int64_t count(const JsonValue& json, const std::string& key,
                   std::optional<std::int64_t> fallback) {
  if (fallback && !field(json, key)) return *fallback;
  const std::int64_t value = json.at(key, "config.json").as_int(key);
  const std::int64_t most =
      key == "num_hidden_layers" ? 10'000 : 1'000'000'000;  // as the keys of [model]
  MOESH_CHECK(value >= 1 && value <= most, ErrorKind::data, key, " is ", value, "; it takes 1 to ",
              most);
  return value;
}

double number(const JsonValue& json, const std::string& key, double fallback, double least,
              double most) {
  const auto found = field(json, key);
  const double value = found ? found->as_number(key) : fallback;
  MOESH_CHECK(value >= least && value <= most, ErrorKind::data, key, " is ", value, "; it takes ",
              least, " to ", most);
  return value;
}

bool flag(const JsonValue& json, const std::string& key, bool fallback) {
  const auto value = field(json, key);
  return value ? value->as_bool(key) : fallback;
}

std::optional<std::vector<std::int64_t>> numbers(const JsonValue& json, const std::string& key) {
  const auto value = field(json, key);
  if (!value) return std::nullopt;
  std::vector<std::int64_t> all;
  for (const auto& v : value->as_list(key)) all.push_back(v.as_int(key));
  return all;
}

JsonList to_list(const std::vector<std::int64_t>& values) {
  JsonList list;
  for (const auto v : values) list.emplace_back(v);
  return list;
}

void require(const JsonValue& json, const std::string& key, const JsonValue& wanted) {
  const auto value = field(json, key);
  const auto* real = std::get_if<double>(&wanted.value);  // 7.0 may be written 7
  MOESH_CHECK(!value || (real ? value->as_number(key) == *real : *value == wanted), ErrorKind::data,
              key, " is ", in_one_line(*value), "; moesh supports only ", in_one_line(wanted));
}

void read_decoder(const JsonValue& json, const JsonDefaults& defaults, DecoderConfig& c) {
  require(json, "hidden_act", {"silu"});
  c.vocab = count(json, "vocab_size"), c.dim = count(json, "hidden_size");
  c.num_layers = count(json, "num_hidden_layers");
  c.num_heads = count(json, "num_attention_heads");
  const char* experts = "num_experts";
  for (const char* alias : {"num_local_experts", "n_routed_experts"})
    if (!json.find(experts) && json.find(alias)) experts = alias;
  c.num_experts = count(json, experts);
  c.top_k = count(json, "num_experts_per_tok");
  c.norm_eps = number(json, "rms_norm_eps", defaults.norm_eps, 1e-30);
  c.max_sequence = count(json, "max_position_embeddings");
  c.init_std = number(json, "initializer_range", 0.02);
  c.tie_embeddings = flag(json, "tie_word_embeddings", false);
  read_rope(json, defaults, c.rope, c.max_sequence);
}

void read_grouped(const JsonValue& json, const JsonDefaults& defaults, GroupedDecoderConfig& c) {
  read_decoder(json, defaults, c);
  c.num_kv_heads = count(json, "num_key_value_heads", c.num_heads);
  c.bias_std = number(json, "initializer_bias_range", 0);  // moesh's own; others begin with zeros
  c.balance_loss = number(json, "router_aux_loss_coef", c.balance_loss);
  c.head_dim =
      count(json, "head_dim", defaults.head_dim > 0 ? defaults.head_dim : c.dim / c.num_heads);
  if (!defaults.rotated) return;
  // Version 5 has it in rope_parameters.
  const auto rope = field(json, "rope_parameters");
  const double outside = number(json, "partial_rotary_factor", *defaults.rotated),
               part = rope ? number(*rope, "partial_rotary_factor", outside) : outside;
  c.rotary_dim = static_cast<std::int64_t>(static_cast<double>(c.head_dim) * part);
  MOESH_CHECK(c.rotary_dim >= 2 && c.rotary_dim <= c.head_dim && c.rotary_dim % 2 == 0,
              ErrorKind::data, "partial_rotary_factor is ", part, ", which rotates ", c.rotary_dim,
              " of the ", c.head_dim, " features of a head; it takes an even number of them");
}

void read_moe(const JsonValue& json, std::int64_t num_layers, DeepseekMoe& m) {
  require(json, "scoring_func", {"sigmoid"});
  require(json, "topk_method", {"noaux_tc"});
  require(json, "moe_layer_freq", {std::int64_t{1}});
  const std::string dense = "first_k_dense_replace";
  m.num_dense_layers = json.at(dense, "config.json").as_int(dense);
  MOESH_CHECK(m.num_dense_layers >= 0 && m.num_dense_layers <= num_layers, ErrorKind::data, dense,
              " is ", m.num_dense_layers, " of num_hidden_layers = ", num_layers);
  m.ffn = count(json, "intermediate_size");
  const auto shared = field(json, "n_shared_experts");
  m.num_shared = shared ? shared->as_int("n_shared_experts") : 0;
  m.num_groups = count(json, "n_group", m.num_groups);
  m.top_groups = count(json, "topk_group", m.top_groups);
  m.normalize = flag(json, "norm_topk_prob", true);
  m.routed_scale = number(json, "routed_scaling_factor", m.routed_scale);
  const std::string further = "num_nextn_predict_layers";
  const auto mtp = field(json, further);
  m.num_mtp_layers = mtp ? mtp->as_int(further) : 0;
  MOESH_CHECK(m.num_mtp_layers >= 0 && m.num_mtp_layers <= 64, ErrorKind::data, further, " is ",
              m.num_mtp_layers, "; it takes 0 to 64");
}

JsonObject decoder_json(const DecoderConfig& c) {
  return {
      {"vocab_size", {c.vocab}},
      {"hidden_size", {c.dim}},
      {"num_hidden_layers", {c.num_layers}},
      {"num_attention_heads", {c.num_heads}},
      {"num_experts_per_tok", {c.top_k}},
      {"hidden_act", {"silu"}},
      {"rms_norm_eps", {c.norm_eps}},
      {"rope_theta", {c.rope.theta}},
      {"rope_parameters", {rope_json(c.rope)}},
      {"max_position_embeddings", {c.max_sequence}},
      {"initializer_range", {c.init_std}},
      {"tie_word_embeddings", {c.tie_embeddings}},
  };
}

JsonObject grouped_json(const GroupedDecoderConfig& c) {
  JsonObject all = joined(decoder_json(c), {{"num_key_value_heads", {c.num_kv_heads}},
                                            {"head_dim", {c.head_dim}},
                                            {"initializer_bias_range", {c.bias_std}},
                                            {"router_aux_loss_coef", {c.balance_loss}}});
  if (c.rotary_dim == 0) return all;
  const double part = static_cast<double>(c.rotary_dim) / static_cast<double>(c.head_dim);
  for (auto& [key, value] : all)
    if (key == "rope_parameters")
      std::get<JsonObject>(value.value).emplace_back("partial_rotary_factor", JsonValue{part});
  all.emplace_back("partial_rotary_factor", JsonValue{part});
  return all;
}

JsonObject moe_json(const DeepseekMoe& m) {
  return {{"intermediate_size", {m.ffn}},
          {"first_k_dense_replace", {m.num_dense_layers}},
          {"n_shared_experts", {m.num_shared}},
          {"n_group", {m.num_groups}},
          {"topk_group", {m.top_groups}},
          {"norm_topk_prob", {m.normalize}},
          {"routed_scaling_factor", {m.routed_scale}},
          {"scoring_func", {"sigmoid"}},
          {"topk_method", {"noaux_tc"}},
          {"num_nextn_predict_layers", {m.num_mtp_layers}}};
}

JsonObject joined(JsonObject fields, const JsonObject& more) {
  fields.insert(fields.end(), more.begin(), more.end());
  return fields;
}

}  // namespace moesh::models
