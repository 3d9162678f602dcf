#include "moesh/formats/safetensors_index.h"

#include <set>

#include "moesh/base/error.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json.h"
#include "moesh/formats/name.h"

namespace moesh::formats {
namespace {

// Some writers give bytes as a float, 1.5e9: what is whole is taken.
std::optional<std::uint64_t> parse_total_size(const JsonValue& json) {
  const JsonValue* metadata = json.find("metadata");
  if (!metadata || metadata->is_null()) return std::nullopt;
  metadata->as_object("metadata");
  const JsonValue* size = metadata->find("total_size");
  if (!size || size->is_null()) return std::nullopt;
  constexpr double kExact = 9007199254740992;  // 2^53
  if (const auto* real = std::get_if<double>(&size->value); real && *real >= 0 && *real <= kExact) {
    const auto whole = static_cast<std::uint64_t>(*real);
    if (static_cast<double>(whole) == *real) return whole;
  }
  return size->as_size("metadata.total_size");
}

}  // namespace

std::vector<std::string> SafetensorsIndex::files() const {
  std::set<std::string> all;
  for (const auto& [tensor, file] : weight_map) all.insert(file);
  return {all.begin(), all.end()};
}

SafetensorsIndex parse_safetensors_index(std::string_view text, const std::string& name) {
  const JsonValue json = parse_json(text, name);
  try {
    SafetensorsIndex index{.total_size = parse_total_size(json)};
    for (const auto& [tensor, file] : json.at("weight_map", "index").as_object("weight_map")) {
      check_file_name(file.as_text(tensor));
      index.weight_map.emplace(tensor, file.as_text(tensor));
    }
    return index;
  } catch (const Error& e) {
    throw Error(e.kind(), detail::concat(name, ": ", e.what()));
  }
}

SafetensorsIndex read_safetensors_index(const std::string& path) {
  return parse_safetensors_index(InputFile(path).read_all(JsonLimits().max_bytes), path);
}

std::string write_safetensors_index(const SafetensorsIndex& index) {
  JsonObject metadata, weight_map;
  if (index.total_size) metadata.emplace_back("total_size", JsonValue{*index.total_size});
  for (const auto& [tensor, file] : index.weight_map) {
    check_file_name(file);
    weight_map.emplace_back(tensor, JsonValue{file});
  }
  return to_json(
      {JsonObject{{"metadata", {std::move(metadata)}}, {"weight_map", {std::move(weight_map)}}}});
}

}  // namespace moesh::formats
