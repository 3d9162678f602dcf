#include "moesh/base/text.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace moesh {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string formatted(const char* format, ...) {
  va_list arguments, again;
  va_start(arguments, format);
  va_copy(again, arguments);
  std::string text(static_cast<std::size_t>(std::vsnprintf(nullptr, 0, format, arguments)), ' ');
  std::vsnprintf(text.data(), text.size() + 1, format, again);
  va_end(again);
  va_end(arguments);
  return text;
}

std::string size_text(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t i = 0;
  for (; std::abs(bytes) >= 1024 && i + 1 < std::size(units); ++i) bytes /= 1024;
  return formatted("%.*f %s", i == 0 ? 0 : 2, bytes, units[i]);
}

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
      safe += size == 1 ? formatted("\\x%02x", letter) : formatted("\\u%04x", letter);
    }
    text.remove_prefix(size);
  }
  return safe;
}

}  // namespace

std::string for_terminal(std::string_view text) { return escaped(text, "\n\t"); }
std::string printable(std::string_view name) { return escaped(name, ""); }

}  // namespace moesh
