#include "moesh/base/terminal.h"

#include <cstdint>
#include <cstdio>

namespace moesh {
namespace {

struct Letter {
  std::uint32_t code = 0;
  std::size_t size = 0;  // bytes; 0: the first of them begins no letter of UTF-8
};

Letter first_letter(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return {first, 1};
  const std::size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc0 ? 2 : 0;
  if (size == 0 || first > 0xf4 || text.size() < size) return {};
  std::uint32_t code = first & (0xffu >> (size + 1));
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3f);
  }
  constexpr std::uint32_t kLeast[] = {0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xd800 && code <= 0xdfff;
  if (code < kLeast[size - 2] || code > 0x10ffff || is_surrogate) return {};
  return {code, size};
}

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
    const Letter letter = first_letter(text);
    const std::size_t size = letter.size == 0 ? 1 : letter.size;
    if (letter.size > 0 &&
        (is_harmless(letter.code) || kept.find(text[0]) != std::string_view::npos)) {
      safe += text.substr(0, size);
    } else {
      char code[8];
      const bool is_byte = size == 1;
      std::snprintf(code, sizeof code, is_byte ? "\\x%02x" : "\\u%04x",
                    is_byte ? static_cast<unsigned>(static_cast<unsigned char>(text[0]))
                            : static_cast<unsigned>(letter.code));
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
