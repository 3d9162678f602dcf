#include "moesh/cli/arguments.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "moesh/base/error.h"

namespace moesh::cli {

std::optional<std::string> take(Args& args, const std::string& name) {
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i].starts_with(name + "=")) {
      const std::string value = args[i].substr(name.size() + 1);
      args.erase(args.begin() + static_cast<std::ptrdiff_t>(i));
      return value;
    }
    if (args[i] != name) continue;
    MOESH_CHECK(i + 1 < args.size() && !args[i + 1].starts_with("--"), ErrorKind::config, name,
                " needs a value, as in ", name, "=...");
    const std::string value = args[i + 1];
    args.erase(args.begin() + static_cast<std::ptrdiff_t>(i),
               args.begin() + static_cast<std::ptrdiff_t>(i) + 2);
    return value;
  }
  return std::nullopt;
}

int take_number(Args& args, const std::string& name, int initial, int least) {
  const auto text = take(args, name);
  if (!text) return initial;
  int value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  MOESH_CHECK(error == std::errc() && end == text->data() + text->size() && value >= least,
              ErrorKind::config, name, " is '", *text, "'; it takes a whole number, ", least,
              " or more");
  return value;
}

double take_real(Args& args, const std::string& name, double initial) {
  const auto text = take(args, name);
  if (!text) return initial;
  double value = 0;
  char rest = 0;
  MOESH_CHECK(
      std::sscanf(text->c_str(), "%lf%c", &value, &rest) == 1 && std::isfinite(value) && value >= 0,
      ErrorKind::config, name, " is '", *text, "'; it takes a number, 0 or more, as in ", name,
      "=1e-5");
  return value;
}

bool take_flag(Args& args, const std::string& name) {
  const auto found = std::find(args.begin(), args.end(), name);
  if (found == args.end()) return false;
  args.erase(found);
  return true;
}

void expect_words(const Args& args, size_t count, const std::string& usage) {
  for (const auto& a : args)
    MOESH_CHECK(!a.starts_with("--"), ErrorKind::config, "there is no option '", a,
                "' here; usage: ", usage);
  MOESH_CHECK(args.size() == count, ErrorKind::config, args.size(), " words where ", count,
              " are needed; usage: ", usage);
}

}  // namespace moesh::cli
