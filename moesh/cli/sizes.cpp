#include "moesh/cli/sizes.h"

#include <cmath>
#include <cstdio>
#include <utility>

#include "moesh/base/error.h"

namespace moesh::cli {

std::int64_t parse_size(const std::string& text) {
  const std::pair<const char*, double> units[] = {{"B", 1},        {"KiB", 0x1p10}, {"MiB", 0x1p20},
                                                  {"GiB", 0x1p30}, {"TiB", 0x1p40}, {"KB", 1e3},
                                                  {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12}};
  double number = 0;
  char unit[8] = "";
  const int num_read = std::sscanf(text.c_str(), "%lf %7s", &number, unit);
  for (const auto& [name, factor] : units)
    if (num_read >= 1 && number > 0 && std::isfinite(number) && std::string(unit) == name)
      return static_cast<std::int64_t>(number * factor);
  throw Error(
      ErrorKind::config,
      "--memory is '" + text + "'; it takes a number with its unit, such as 80GiB, 80GB or 500MiB");
}

std::string size_text(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t i = 0;
  for (; std::abs(bytes) >= 1024 && i + 1 < std::size(units); ++i) bytes /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, i == 0 ? "%.0f %s" : "%.2f %s", bytes, units[i]);
  return text;
}

}  // namespace moesh::cli
