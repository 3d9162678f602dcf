// A configuration: what is read as a value reads back as the same value.

#include <cmath>

#include "moesh/formats/toml.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace moesh::fuzz;
  using namespace moesh::formats;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto entries =
      unless_refused([&] { return parse_toml(text, "toml"); }, moesh::ErrorKind::config);
  if (!entries) return 0;
  for (const TomlEntry& entry : *entries) {
    must(!entry.key.empty() && entry.line >= 1, "an entry has a key and a line");
    const auto again = parse_toml("a = " + to_toml(entry.value), "again");
    const auto* real = std::get_if<double>(&entry.value);
    must(again.size() == 1 && (again[0].value == entry.value || (real && std::isnan(*real))),
         "a value reads back as it was written");
  }
  return 0;
}
