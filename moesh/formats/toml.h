#pragma once
// TOML files as a flat list of values.

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace moesh::formats {

using TomlValue = std::variant<bool, std::int64_t, double, std::string>;

/// steps = 3 below [training] in line 7: {"training.steps", 3, 7}.
struct TomlEntry {
  std::string key;
  TomlValue value;
  int line = 0;
  bool operator==(const TomlEntry&) const = default;
};

/// Every value of a text, in the order of its lines. `name` is what errors (config) call it:
/// "run.toml:3: ...".
std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& name);
std::vector<TomlEntry> read_toml(const std::string& path);

/// A value as TOML writes it, so that it reads back as the same value: true, 3, 0.001, "text".
std::string to_toml(const TomlValue& value);

}  // namespace moesh::formats
