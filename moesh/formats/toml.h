#pragma once
// TOML files as a flat list of values.

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace moesh::formats {

using TomlValue = std::variant<bool, std::int64_t, double, std::string>;

/// steps = 3 below [training] in line 7: {"training.steps", 3, 7}. Of the second [[data.source]]:
/// {"data.source.1.path", ...}.
struct TomlEntry {
  std::string key;
  TomlValue value;
  int line = 0;
  bool operator==(const TomlEntry&) const = default;
};

constexpr std::size_t kMaxTomlBytes = 16 << 20;
constexpr std::size_t kMaxKeyParts = 100;

/// Every value of a text, in the order of its lines. `name` is what errors (config) call it:
/// "run.toml:3: ...". A longer text, or a key of more parts, is refused before it is parsed: each
/// part is a table in a table.
std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& name);
std::vector<TomlEntry> read_toml(const std::string& path);

/// A value as TOML writes it, so that it reads back as the same value: true, 3, 0.001, "text".
std::string to_toml(const TomlValue& value);

}  // namespace moesh::formats
