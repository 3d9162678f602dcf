#include "moesh/models/disk.h"

#include <functional>
#include <map>

#include "moesh/base/error.h"

namespace moesh::models {
namespace {

bool is_tied(const formats::JsonValue& json) {
  const auto* tied = json.find("tie_word_embeddings");
  return tied && tied->as_bool("tie_word_embeddings");
}

using Reader = std::function<formats::ModelOnDisk(const formats::JsonValue& json)>;

const std::map<std::string, Reader>& readers() {
  static const std::map<std::string, Reader> all{
      {"deepseek_v3", [](const auto& json) { return on_disk(deepseek_v3_config(json), is_tied(json)); }},
  };
  return all;
}

}  // namespace

std::string expert_bias_name(const std::string& gate_weight) {
  return gate_weight.substr(0, gate_weight.rfind('.')) + ".expert_bias";
}

formats::ModelOnDisk model_on_disk(const std::string& config_json, const std::string& name) {
  const formats::JsonValue json = formats::parse_json(config_json, name);
  try {
    const std::string& type = json.at("model_type", "it").as_text("model_type");
    const auto reader = readers().find(type);
    std::string known;
    for (const auto& [model, read] : readers()) known += (known.empty() ? "" : ", ") + model;
    MOESH_CHECK(reader != readers().end(), ErrorKind::data, "model_type is '", type, "'; moesh knows ", known);
    return reader->second(json);
  } catch (const Error& e) {
    throw Error(e.kind(), name + ": " + e.what());
  }
}

}  // namespace moesh::models
