#include "moesh/base/terminal.h"

#include <cstdint>
#include <cstdio>

#include "moesh/base/utf8.h"

namespace moesh {
namespace {

bool is_harmless(std::uint32_t code) {
  const auto is_in = [&](std::uint32_t first, std::uint32_t last) {
    return code >= first && code <= last;
  };
  return !is_in(0, 0x1f) && !is_in(0x7f, 0x9f) && code != 0x61c && !is_in(0x200e, 0x200f) &&
         !is_in(0x2028, 0x202e) && !is_in(0x2066, 0x2069);
}

std::string escaped(std::string_view text, std::string_view kept) {
  std::string safe;
  while (!text.empty()) {
    const auto [length, valid] = first_utf8(text);
    const std::size_t size = valid ? length : 1;
    const char* at = text.data();
    const std::uint32_t letter = valid ? next_code_point(at) : static_cast<unsigned char>(text[0]);
    if (valid && (is_harmless(letter) || kept.find(text[0]) != std::string_view::npos)) {
      safe += text.substr(0, size);
    } else {
      char code[16];
      std::snprintf(code, sizeof code, size == 1 ? "\\x%02x" : "\\u%04x", letter);
      safe += code;
    }
    text.remove_prefix(size);
  }
  return safe;
}

}  // namespace

std::string for_terminal(std::string_view text) { return escaped(text, "\n\t"); }
std::string printable(std::string_view name) { return escaped(name, ""); }

}  // namespace moesh
