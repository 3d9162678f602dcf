#include "moesh/base/utf8.h"

#include <cstdint>
#include <cstring>

namespace moesh {

// Table 3-7 of the Unicode standard.
Utf8Sequence first_utf8(std::string_view bytes) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return {1, true};
  if (first < 0xC2 || first > 0xF4) return {1, false};
  const std::size_t size = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  const unsigned low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  for (std::size_t i = 1; i < size; ++i) {
    if (i == bytes.size()) return {i, false};
    if (i == 1 ? byte(1) < low || byte(1) > high : !is_continuation(bytes[i])) return {i, false};
  }
  return {size, true};
}

std::size_t find_bad_utf8(std::string_view text) {
  std::size_t i = 0;
  while (i < text.size()) {
    if (std::uint64_t eight; i + 8 <= text.size()) {
      std::memcpy(&eight, text.data() + i, 8);
      if ((eight & 0x8080808080808080u) == 0) {
        i += 8;
        continue;
      }
    }
    const Utf8Sequence sequence = first_utf8(text.substr(i));
    if (!sequence.valid) return i;
    i += sequence.size;
  }
  return std::string_view::npos;
}

std::string with_replacements(std::string_view bytes) {
  std::string text;
  while (!bytes.empty()) {
    const Utf8Sequence sequence = first_utf8(bytes);
    if (sequence.valid)
      text += bytes.substr(0, sequence.size);
    else
      text += "\xEF\xBF\xBD";
    bytes.remove_prefix(sequence.size);
  }
  return text;
}

}  // namespace moesh
