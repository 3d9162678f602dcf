#include "moesh/train/metrics/kept_lines.h"

#include <optional>
#include <sstream>

#include "moesh/base/error.h"
#include "moesh/formats/json.h"

namespace moesh::train {
namespace {

std::optional<std::int64_t> step_of(const std::string& line, const std::string& name) {
  try {
    return formats::parse_json(line, name).at("step", name).as_int(name);
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

std::string kept_lines(const std::string& text, const std::string& name, std::int64_t last_step) {
  std::istringstream lines(last_step > 0 ? text : "");
  std::string kept;
  for (std::string line; std::getline(lines, line);)
    if (const auto step = step_of(line, name); step && *step <= last_step) kept += line + "\n";
  return kept;
}

}  // namespace moesh::train
