#include <toml++/toml.h>

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/formats/toml.h"

namespace moesh::formats {
namespace {

int line_of(const toml::node& node) { return static_cast<int>(node.source().begin.line); }

void flatten(const toml::table& table, const std::string& prefix, const std::string& name,
             std::vector<TomlEntry>& entries) {
  for (const auto& [key, node] : table) {
    const std::string path = prefix + std::string(key);
    if (const auto* below = node.as_table()) {
      flatten(*below, path + '.', name, entries);
      continue;
    }
    TomlEntry entry{.key = path, .line = line_of(node)};
    if (const auto* flag = node.as_boolean()) {
      entry.value = flag->get();
    } else if (const auto* whole = node.as_integer()) {
      entry.value = std::int64_t{whole->get()};
    } else if (const auto* real = node.as_floating_point()) {
      entry.value = real->get();
    } else if (const auto* text = node.as_string()) {
      entry.value = text->get();
    } else {
      throw Error(ErrorKind::config,
                  detail::concat(name, ":", entry.line, ": ", path, " is ",
                                 node.is_array() ? "a list" : "a date or a time",
                                 "; a value is a text, a number, true or false"));
    }
    entries.push_back(std::move(entry));
  }
}

}  // namespace

std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& name) {
  std::vector<TomlEntry> entries;
  try {
    flatten(toml::parse(text, name), "", name, entries);
  } catch (const toml::parse_error& e) {
    throw Error(ErrorKind::config,
                detail::concat(name, ":", e.source().begin.line, ": ", e.description(), " (column ",
                               e.source().begin.column, ")"));
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const TomlEntry& a, const TomlEntry& b) { return a.line < b.line; });
  return entries;
}

}  // namespace moesh::formats
