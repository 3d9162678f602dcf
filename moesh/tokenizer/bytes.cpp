#include "moesh/tokenizer/bytes.h"

#include <array>

#include "moesh/base/utf8.h"

namespace moesh::tokenizer {
namespace {

struct Letters {
  std::array<char32_t, 256> of_byte{};
  std::array<int, 0x144> byte_of{};  // -1: none

  Letters() {
    byte_of.fill(-1);
    char32_t next = 0x100;
    for (unsigned b = 0; b < 256; ++b) {
      const bool prints =
          (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      of_byte[b] = prints ? b : next++;
      byte_of[of_byte[b]] = static_cast<int>(b);
    }
  }
};
const Letters& letters() {
  static const Letters all;
  return all;
}

}  // namespace

char32_t letter_of_byte(unsigned char byte) { return letters().of_byte[byte]; }

std::optional<std::string> bytes_of_letters(std::string_view text) {
  const auto& byte_of = letters().byte_of;
  std::string bytes;
  for (const char *at = text.data(), *end = at + text.size(); at < end;) {
    const char32_t c = next_code_point(at);
    if (c >= byte_of.size() || byte_of[c] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(byte_of[c]));
  }
  return bytes;
}

}  // namespace moesh::tokenizer
