// The text of a config.json: any JSON.

#include <nlohmann/json.hpp>

#include "moesh/formats/json.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace moesh::fuzz;
  using namespace moesh::formats;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto value = unless_refused([&] { return parse_json(text, "config"); });
  if (!value) return 0;
  const std::string written = to_json(*value);
  must(parse_json(written, "config") == *value, "a value reads back as it was written");
  must(nlohmann::json::parse(text) == nlohmann::json::parse(written),
       "nlohmann/json reads the same value");
  return 0;
}
