#include "moesh/formats/adapter_config.h"

#include <algorithm>
#include <cctype>

#include "moesh/base/error.h"
#include "moesh/formats/json.h"
#include "moesh/formats/pattern.h"

namespace moesh::formats {
namespace {

template <class T>
T first_match(const std::vector<std::pair<std::string, T>>& patterns, const std::string& name,
              T otherwise) {
  for (const auto& [pattern, value] : patterns)
    if (matches_end(pattern, name)) return value;
  return otherwise;
}

std::string json_shown(const JsonValue& value) {
  const std::string line = to_json_line(value);
  return line.substr(0, line.size() - 1);
}

// With most of these names PEFT puts a part of each weight into the first A and B, and computes
// with the rest of it. Only these leave the model as it is.
void check_beginning(const JsonValue* json) {
  if (!json || !std::holds_alternative<std::string>(json->value)) return;
  std::string name = std::get<std::string>(json->value);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  MOESH_CHECK(
      name == "gaussian" || name == "eva" || name == "orthogonal" || name == "mica",
      ErrorKind::data, "init_lora_weights is ", json_shown(*json),
      ": PEFT changes the model's weights before it adds A and B, and moesh does not; merge "
      "the adapter into the model with PEFT (merge_and_unload), or convert it to plain LoRA "
      "where PEFT can (save_pretrained with path_initial_model_for_weight_conversion: "
      "PiSSA, OLoRA, CorDA, LoRA-GA)");
}

// Keys that change the result and are not supported, with the values that have no effect.
void refuse_others(const JsonValue& json) {
  const std::pair<const char*, JsonValue> wanted[] = {{"bias", {std::string("none")}},
                                                      {"use_dora", {false}},
                                                      {"use_qalora", {false}},
                                                      {"lora_bias", {false}},
                                                      {"fan_in_fan_out", {false}}};
  for (const auto& [key, value] : wanted) {
    const auto* found = json.find(key);
    MOESH_CHECK(!found || found->is_null() || *found == value, ErrorKind::data, key, " is ",
                json_shown(*found), "; moesh computes plain LoRA, with ", json_shown(value));
  }
  for (const char* key : {"modules_to_save", "trainable_token_indices", "layer_replication",
                          "alora_invocation_tokens", "target_modules_to_tie", "use_bdlora",
                          "velora_config", "kasa_config", "monteclora_config"}) {
    const auto* found = json.find(key);
    MOESH_CHECK(!found || found->is_null() || *found == JsonValue{JsonList{}}, ErrorKind::data, key,
                " is ", json_shown(*found), "; moesh computes plain LoRA, without it");
  }
}

template <class T, class Read>
std::vector<std::pair<std::string, T>> read_patterns(const JsonValue& json, const char* key,
                                                     Read read) {
  std::vector<std::pair<std::string, T>> all;
  if (const auto* found = json.find(key); found && !found->is_null())
    for (const auto& [pattern, value] : found->as_object(key)) {
      try {
        Pattern{pattern};
      } catch (const Error& e) {
        throw Error(ErrorKind::data, detail::concat(key, ": ", e.what()));
      }
      all.emplace_back(pattern, read(value, detail::concat(key, ": ", pattern)));
    }
  return all;
}

std::int64_t read_rank(const JsonValue& value, const std::string& what) {
  const std::int64_t rank = value.as_int(what);
  MOESH_CHECK(rank >= 1, ErrorKind::data, what, " is ", rank, "; a rank is 1 or more");
  return rank;
}

JsonList listed(const std::vector<std::string>& texts) {
  JsonList list;
  for (const auto& t : texts) list.push_back({t});
  return list;
}

template <class T>
JsonObject object_of(const std::vector<std::pair<std::string, T>>& patterns) {
  JsonObject object;
  for (const auto& [pattern, value] : patterns) object.emplace_back(pattern, JsonValue{value});
  return object;
}

}  // namespace

bool matches_end(const std::string& pattern, const std::string& name) {
  return Pattern("^(?:.*\\.)?(?:" + pattern + ")$").is_in(name);
}

std::int64_t AdapterConfig::rank_of(const std::string& name) const {
  return first_match(rank_pattern, name, rank);
}
double AdapterConfig::alpha_of(const std::string& name) const {
  return first_match(alpha_pattern, name, alpha);
}

AdapterConfig parse_adapter_config(std::string_view text, const std::string& name) {
  const JsonValue json = parse_json(text, name);
  try {
    const auto& type = json.at("peft_type", "it").as_text("peft_type");
    MOESH_CHECK(type == "LORA", ErrorKind::data, "peft_type is '", type, "'; moesh reads LORA");
    refuse_others(json);
    check_beginning(json.find("init_lora_weights"));
    const auto number = [](const JsonValue& value, const std::string& what) {
      return value.as_number(what);
    };
    AdapterConfig c{.rank = read_rank(json.at("r", "it"), "r"),
                    .alpha = json.at("lora_alpha", "it").as_number("lora_alpha"),
                    .rank_pattern = read_patterns<std::int64_t>(json, "rank_pattern", read_rank),
                    .alpha_pattern = read_patterns<double>(json, "alpha_pattern", number),
                    .target_modules = {},
                    .target_parameters = {},
                    .base_model = {}};
    if (const auto* v = json.find("use_rslora")) c.use_rslora = v->as_bool("use_rslora");
    if (const auto* v = json.find("lora_dropout")) c.dropout = v->as_number("lora_dropout");
    if (const auto* v = json.find("target_parameters"); v && !v->is_null())
      for (const auto& t : v->as_list("target_parameters"))
        c.target_parameters.push_back(t.as_text("target_parameters"));
    if (const auto* v = json.find("base_model_name_or_path"); v && !v->is_null())
      c.base_model = v->as_text("base_model_name_or_path");
    return c;
  } catch (const Error& e) {
    throw Error(ErrorKind::data, name + ": " + e.what());
  }
}

std::string write_adapter_config(const AdapterConfig& c) {
  const JsonValue null;
  return to_json({JsonObject{
      {"peft_type", {"LORA"}},
      {"task_type", {"CAUSAL_LM"}},
      {"base_model_name_or_path", c.base_model.empty() ? null : JsonValue{c.base_model}},
      {"r", {c.rank}},
      {"lora_alpha", {c.alpha}},
      {"lora_dropout", {c.dropout}},
      {"use_rslora", {c.use_rslora}},
      {"rank_pattern", {object_of(c.rank_pattern)}},
      {"alpha_pattern", {object_of(c.alpha_pattern)}},
      {"target_modules", {listed(c.target_modules)}},
      {"target_parameters",
       c.target_parameters.empty() ? null : JsonValue{listed(c.target_parameters)}},
      {"bias", {"none"}},
      {"use_dora", {false}},
      {"fan_in_fan_out", {false}},
      {"init_lora_weights", {true}},
      {"inference_mode", {true}},
      {"modules_to_save", null}}});
}

}  // namespace moesh::formats
