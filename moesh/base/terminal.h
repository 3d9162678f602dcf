#pragma once
// What is shown to a person: texts have names in them that others chose.

#include <cstdio>
#include <string>
#include <string_view>

namespace moesh {

/// The text with \xNN in the place of what would control a terminal; line ends and tabs stay.
inline std::string for_terminal(std::string_view text) {
  std::string safe;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte >= 0x20 && byte != 0x7f) || c == '\n' || c == '\t') {
      safe += c;
      continue;
    }
    char code[8];
    std::snprintf(code, sizeof code, "\\x%02x", static_cast<unsigned>(byte));
    safe += code;
  }
  return safe;
}

}  // namespace moesh
