#pragma once
// model.safetensors.index.json: which file of a folder holds which tensor.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moesh::formats {

constexpr const char* kIndexFile = "model.safetensors.index.json";

struct SafetensorsIndex {
  std::map<std::string, std::string>
      weight_map;                           // name of a tensor -> name of a file in the same folder
  std::optional<std::uint64_t> total_size;  // bytes of all tensors; not every index says it

  bool operator==(const SafetensorsIndex&) const = default;

  /// The files, each once, sorted.
  std::vector<std::string> files() const;
};

/// Files are names, not paths: an index cannot make anyone read outside of its folder. Further keys
/// are skipped.
SafetensorsIndex parse_safetensors_index(std::string_view text, const std::string& name);
SafetensorsIndex read_safetensors_index(const std::string& path);

std::string write_safetensors_index(const SafetensorsIndex& index);

}  // namespace moesh::formats
