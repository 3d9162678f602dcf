#include "moesh/models/disk.h"

#include <functional>
#include <map>

#include "moesh/base/error.h"

namespace moesh::models {
namespace {

using Reader = std::function<AnyConfig(const formats::JsonValue& json)>;

// By model_type.
const std::map<std::string, Reader>& readers() {
  static const std::map<std::string, Reader> all{
      {"deepseek_v3", deepseek_v3_config},
  };
  return all;
}

}  // namespace

AnyConfig config_of(const std::string& config_json, const std::string& name) {
  const formats::JsonValue json = formats::parse_json(config_json, name);
  try {
    const std::string& type = json.at("model_type", "it").as_text("model_type");
    const auto reader = readers().find(type);
    std::string known;
    for (const auto& [model, read] : readers()) known += (known.empty() ? "" : ", ") + model;
    MOESH_CHECK(reader != readers().end(), ErrorKind::data, "model_type is '", type, "'; moesh reads ", known);
    return reader->second(json);
  } catch (const Error& e) {
    throw Error(e.kind(), name + ": " + e.what());
  }
}

formats::ModelOnDisk on_disk(const AnyConfig& config) {
  if (const auto* c = std::get_if<DeepseekV3Config>(&config)) return deepseek_v3_on_disk(*c);
  throw Error(ErrorKind::config, "checkpoints of " + models::name(config) + " have no table yet; set checkpoint.enable=false");
}

std::string expert_bias_name(const std::string& gate_weight) {
  return gate_weight.substr(0, gate_weight.rfind('.')) + ".expert_bias";
}

}  // namespace moesh::models
