#include "moesh/models/config_json.h"

#include <utility>

#include "moesh/base/error.h"
#include "moesh/models/configs.h"

namespace moesh::models {
namespace {

// For a message.
std::string in_one_line(const JsonValue& value) {
  std::string text = formats::to_json(value);
  std::erase(text, '\n');
  return text;
}

// The keys of each kind of scaling.
void scaling_fields(ConfigJson& json, const std::string& kind, nn::RopeConfig& r,
                    std::int64_t max_sequence) {
  json.number("factor", r.factor, 1, /*least=*/1);
  if (json.reads() || kind != "linear")
    json.count("original_max_position_embeddings", r.original_length, max_sequence);
  if (kind == "llama3") {
    json.number("low_freq_factor", r.low_turns, 1);
    json.number("high_freq_factor", r.high_turns, 4);
  } else if (kind == "yarn") {
    json.number("beta_fast", r.beta_fast, 32), json.number("beta_slow", r.beta_slow, 1);
    json.number_if_any("mscale", r.mscale);
    json.number_if_any("mscale_all_dim", r.mscale_all_dim);
    json.number_if_any("attention_factor", r.magnitude);
    if (json.reads() || !r.truncate) json.flag("truncate", r.truncate, true);
  }
}

constexpr std::pair<const char*, nn::RopeScaling> kScalings[] = {
    {"linear", nn::RopeScaling::linear},
    {"llama3", nn::RopeScaling::llama3},
    {"yarn", nn::RopeScaling::yarn}};

// Version 5 has rope_parameters, version 4 rope_theta and rope_scaling.
void read_rope(ConfigJson& json, const JsonDefaults& defaults, nn::RopeConfig& r,
               std::int64_t max_sequence) {
  auto found = json.find("rope_parameters");
  if (!found) found = json.find("rope_scaling");
  if (!found) r = defaults.rope;
  constexpr double kLeastTheta = 2, kMostTheta = 1e12;  // as model.rope_theta
  json.number("rope_theta", r.theta, defaults.theta, kLeastTheta, kMostTheta);
  if (!found) return;
  ConfigJson rope(*found);
  rope.number("rope_theta", r.theta, r.theta, kLeastTheta, kMostTheta);
  if (!defaults.rotated) rope.require("partial_rotary_factor", {1.0});
  auto type = rope.find("rope_type");
  if (!type) type = rope.find("type");
  const std::string kind = type ? type->as_text("rope_type") : "default";
  if (kind == "default") return;
  for (const auto& [name, scaling] : kScalings)
    if (kind == name) {
      r.scaling = scaling;
      return scaling_fields(rope, kind, r, max_sequence);
    }
  throw Error(ErrorKind::data,
              "rope_type is '" + kind + "'; moesh computes default, linear, llama3 and yarn");
}

void write_rope(ConfigJson& json, nn::RopeConfig& r) {
  std::string kind = "default";
  for (const auto& [name, scaling] : kScalings)
    if (r.factor > 1 && r.scaling == scaling) kind = name;
  ConfigJson rope;
  rope.write("rope_type", {kind}), rope.write("rope_theta", {r.theta});
  if (kind != "default") scaling_fields(rope, kind, r, 0);
  json.write("rope_theta", {r.theta});
  json.write("rope_parameters", {std::move(rope.written())});
}

// The part of each head that is rotated. Version 5 has it in rope_parameters.
void read_rotated(ConfigJson& json, double otherwise, GroupedDecoderConfig& c) {
  double part = otherwise;
  const auto rope = json.find("rope_parameters");
  json.number("partial_rotary_factor", part, part);
  if (rope) ConfigJson(*rope).number("partial_rotary_factor", part, part);
  c.rotary_dim = static_cast<std::int64_t>(static_cast<double>(c.head_dim) * part);
  MOESH_CHECK(c.rotary_dim >= 2 && c.rotary_dim <= c.head_dim && c.rotary_dim % 2 == 0,
              ErrorKind::data, "partial_rotary_factor is ", part, ", which rotates ", c.rotary_dim,
              " of the ", c.head_dim, " features of a head; it takes an even number of them");
}

void write_rotated(ConfigJson& json, const GroupedDecoderConfig& c) {
  if (c.rotary_dim == 0) return;
  const double part = static_cast<double>(c.rotary_dim) / static_cast<double>(c.head_dim);
  for (auto& [key, value] : json.written())
    if (key == "rope_parameters")
      std::get<JsonObject>(value.value).emplace_back("partial_rotary_factor", JsonValue{part});
  json.write("partial_rotary_factor", {part});
}

}  // namespace

std::optional<JsonValue> ConfigJson::find(const std::string& key) const {
  const auto* found = from_->find(key);
  return found && !found->is_null() ? std::optional(*found) : std::nullopt;
}

void ConfigJson::count(const std::string& key, std::int64_t& value,
                       std::optional<std::int64_t> fallback, std::int64_t least,
                       std::int64_t most) {
  if (!reads()) return write(key, {value});
  if (fallback && !find(key)) {
    value = *fallback;
    return;
  }
  value = from_->at(key, "config.json").as_int(key);
  MOESH_CHECK(value >= least && value <= most, ErrorKind::data, key, " is ", value, "; it takes ",
              least, " to ", most);
}

void ConfigJson::count_or_null(const std::string& key, std::int64_t& value, std::int64_t absent) {
  if (!reads()) return write(key, value > 0 ? JsonValue{value} : JsonValue{});
  count(key, value, from_->find(key) ? 0 : absent);
}

void ConfigJson::number(const std::string& key, double& value, double fallback, double least,
                        double most) {
  if (!reads()) return write(key, {value});
  const auto found = find(key);
  value = found ? found->as_number(key) : fallback;
  MOESH_CHECK(value >= least && value <= most, ErrorKind::data, key, " is ", value, "; it takes ",
              least, " to ", most);
}

void ConfigJson::number_if_any(const std::string& key, double& value) {
  if (reads() || value != 0) number(key, value, 0);
}

void ConfigJson::flag(const std::string& key, bool& value, bool fallback) {
  if (!reads()) return write(key, {value});
  const auto found = find(key);
  value = found ? found->as_bool(key) : fallback;
}

void ConfigJson::list(const std::string& key, std::vector<std::int64_t>& values) {
  if (!reads()) return write(key, {JsonList(values.begin(), values.end())});
  values.clear();
  if (const auto found = find(key))
    for (const auto& v : found->as_list(key)) values.push_back(v.as_int(key));
}

void ConfigJson::require(const std::string& key, const JsonValue& wanted) const {
  if (!reads()) return;
  const auto value = find(key);
  const auto* real = std::get_if<double>(&wanted.value);  // 7.0 may be written 7
  MOESH_CHECK(!value || (real ? value->as_number(key) == *real : *value == wanted), ErrorKind::data,
              key, " is ", in_one_line(*value), "; moesh supports only ", in_one_line(wanted));
}

void ConfigJson::only(const std::string& key, const JsonValue& wanted) {
  if (reads())
    require(key, wanted);
  else
    write(key, wanted);
}

void decoder_fields(ConfigJson& json, const JsonDefaults& defaults, DecoderConfig& c) {
  json.count("vocab_size", c.vocab), json.count("hidden_size", c.dim);
  json.count("num_hidden_layers", c.num_layers, {}, 1, 10'000);  // as model.num_layers
  json.count("num_attention_heads", c.num_heads);
  std::string experts = defaults.num_experts;
  if (json.reads()) {
    experts = "num_experts";
    for (const char* alias : {"num_local_experts", "n_routed_experts"})
      if (!json.from().find(experts) && json.from().find(alias)) experts = alias;
  }
  json.count(experts, c.num_experts);
  json.count("num_experts_per_tok", c.top_k);
  json.only("hidden_act", {"silu"});
  json.number("rms_norm_eps", c.norm_eps, defaults.norm_eps, 1e-30);
  json.count("max_position_embeddings", c.max_sequence);
  json.number("initializer_range", c.init_std, 0.02);
  json.flag("tie_word_embeddings", c.tie_embeddings, false);
  if (json.reads())
    read_rope(json, defaults, c.rope, c.max_sequence);
  else
    write_rope(json, c.rope);
}

void grouped_fields(ConfigJson& json, const JsonDefaults& defaults, GroupedDecoderConfig& c) {
  decoder_fields(json, defaults, c);
  json.count("num_key_value_heads", c.num_kv_heads, c.num_heads);
  json.number("initializer_bias_range", c.bias_std, 0);  // moesh's own; others begin with zeros
  json.number("router_aux_loss_coef", c.balance_loss, c.balance_loss);
  json.count("head_dim", c.head_dim,
             defaults.head_dim > 0 ? defaults.head_dim : c.dim / c.num_heads);
  if (!json.reads())
    write_rotated(json, c);
  else if (defaults.rotated)
    read_rotated(json, *defaults.rotated, c);
}

void moe_fields(ConfigJson& json, std::int64_t num_layers, DeepseekMoe& m) {
  json.only("scoring_func", {"sigmoid"});
  json.only("topk_method", {"noaux_tc"});
  json.require("moe_layer_freq", {std::int64_t{1}});
  json.count("first_k_dense_replace", m.num_dense_layers, {}, 0, num_layers);
  json.count("intermediate_size", m.ffn);
  json.count("n_shared_experts", m.num_shared, 0, 0);
  json.count("n_group", m.num_groups, m.num_groups);
  json.count("topk_group", m.top_groups, m.top_groups);
  json.flag("norm_topk_prob", m.normalize, true);
  json.number("routed_scaling_factor", m.routed_scale, m.routed_scale);
  json.count("num_nextn_predict_layers", m.num_mtp_layers, 0, 0, 64);
}

}  // namespace moesh::models
