#include "moesh/formats/text_model.h"

namespace moesh::formats {
namespace {
constexpr const char* kText = "language_model.";
}

JsonValue text_model(const JsonValue& config_json) {
  const JsonValue* text = config_json.find("text_config");
  if (!text || !std::holds_alternative<JsonObject>(text->value)) return config_json;
  JsonValue out = *text;
  for (const char* key : {"dtype", "torch_dtype", "quantization_config"})
    if (const JsonValue* whole = config_json.find(key); whole && !out.find(key))
      std::get<JsonObject>(out.value).emplace_back(key, *whole);
  return out;
}

bool is_of_text_and_images(const std::string& name) { return name.starts_with(kText); }

std::string name_in_text_model(const std::string& name) {
  return is_of_text_and_images(name) ? name.substr(std::string(kText).size()) : "";
}

}  // namespace moesh::formats
