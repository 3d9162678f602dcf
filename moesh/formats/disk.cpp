#include "moesh/formats/disk.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "moesh/base/error.h"
#include "moesh/formats/file.h"

namespace moesh::formats {

namespace {

std::int64_t product(const std::vector<std::int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

void check_source(const DiskTensor& t, const Source& s) {
  std::vector<int> used(t.view.size(), 0);
  for (const std::size_t dim : s.dims)
    if (dim < used.size()) ++used[dim];
  for (const auto& [dim, index] : s.fixed)
    if (dim < used.size() && index >= 0 && index < t.view[dim]) ++used[dim];
  MOESH_CHECK(s.offset.size() == s.dims.size() && s.dims.size() + s.fixed.size() == t.view.size() &&
                  used == std::vector<int>(t.view.size(), 1),
              "disk table: tensor '", t.name, "', view ", t.view, ": its source '", s.param,
              "' must name every dimension of the view once, in dims or in fixed");
}

bool overlap(const Source& a, const Source& b) {
  for (const auto& [dim, index] : a.fixed)
    for (const auto& [other_dim, other] : b.fixed)
      if (dim == other_dim && index != other) return false;
  return true;
}

}  // namespace

DiskTensor whole_tensor(const std::string& name, const std::string& param,
                        const std::vector<std::int64_t>& shape) {
  std::vector<std::size_t> dims(shape.size());
  std::iota(dims.begin(), dims.end(), std::size_t{0});
  return {
      .name = name,
      .shape = shape,
      .view = shape,
      .sources = {
          {.param = param, .offset = std::vector<std::int64_t>(shape.size(), 0), .dims = dims}}};
}

void DiskTable::validate() const {
  for (const DiskTensor& t : tensors) {
    MOESH_CHECK(product(t.shape) == product(t.view), "disk table: tensor '", t.name, "' of shape ",
                t.shape, " is seen as ", t.view, ", which has another number of elements");
    std::int64_t covered = 0;
    for (const Source& s : t.sources) {
      check_source(t, s);
      std::int64_t size = 1;
      for (const std::size_t dim : s.dims) size *= t.view[dim];
      covered += size;
      for (const Source& other : t.sources)
        MOESH_CHECK(&s == &other || !overlap(s, other), "disk table: tensor '", t.name,
                    "': its sources '", s.param, "' and '", other.param, "' overlap");
    }
    MOESH_CHECK(covered == product(t.shape), "disk table: tensor '", t.name, "' has ",
                product(t.shape), " elements, and its sources fill ", covered);
  }
}

const char* to_string(ExpertLayout layout) {
  return layout == ExpertLayout::per_expert ? "per_expert" : "stacked";
}

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

std::string with_layers_that_are_there(const std::string& config_json,
                                       const std::filesystem::path& folder) {
  const std::string field = "num_nextn_predict_layers", name = (folder / "config.json").string();
  JsonValue json = parse_json(config_json, name);
  const JsonValue *asked = json.find(field), *num_layers = json.find("num_hidden_layers");
  if (!asked || !num_layers || *asked == JsonValue{} || *asked == JsonValue{std::int64_t{0}})
    return config_json;
  std::vector<std::string> names;
  if (formats::exists(folder / kIndexFile)) {
    const SafetensorsIndex index = read_safetensors_index((folder / kIndexFile).string());
    for (const auto& [tensor, file] : index.weight_map) names.push_back(tensor);
  } else if (formats::exists(folder / kSingleFile)) {
    const SafetensorsFile file(folder / kSingleFile);
    for (const auto& tensor : file.header().tensors) names.push_back(tensor.name);
  }
  const std::string first =
      "layers." + std::to_string(num_layers->as_int("num_hidden_layers")) + ".";
  const auto is_of_it = [&](const std::string& n) { return n.find(first) != std::string::npos; };
  if (names.empty() || std::any_of(names.begin(), names.end(), is_of_it)) return config_json;
  for (auto& [key, value] : std::get<JsonObject>(json.value))
    if (key == field) value = {std::int64_t{0}};
  return to_json(json);
}

bool is_of_text_and_images(const std::string& name) { return name.starts_with(kText); }

std::string name_in_text_model(const std::string& name) {
  return is_of_text_and_images(name) ? name.substr(std::string(kText).size()) : "";
}

}  // namespace moesh::formats
