#pragma once
// Code points of UTF-8 texts. Functions want texts that are valid, unless they say otherwise.

#include <cstddef>
#include <string>
#include <string_view>

namespace moesh {

struct Utf8Sequence {
  std::size_t size;  // of the bytes that begin a character, all of it if valid
  bool valid;
};
/// The character at the front of any bytes, of which there is one at least.
Utf8Sequence first_utf8(std::string_view bytes);

/// The first byte that cannot be part of UTF-8 (no surrogates, nothing longer than needed), or
/// npos.
std::size_t find_bad_utf8(std::string_view text);

/// The bytes, with U+FFFD in place of each longest beginning of a character that does not go on.
std::string with_replacements(std::string_view bytes);

inline bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

/// The code point at `at`, which moves behind it.
inline char32_t next_code_point(const char*& at) {
  const auto byte = [&](int i) { return static_cast<unsigned char>(at[i]); };
  const char32_t first = byte(0);
  if (first < 0x80) return ++at, first;
  const auto low = [&](int i) { return static_cast<char32_t>(byte(i) & 0x3F); };
  if (first < 0xE0) {
    const char32_t c = (first & 0x1F) << 6 | low(1);
    return at += 2, c;
  }
  if (first < 0xF0) {
    const char32_t c = (first & 0x0F) << 12 | low(1) << 6 | low(2);
    return at += 3, c;
  }
  const char32_t c = (first & 0x07) << 18 | low(1) << 12 | low(2) << 6 | low(3);
  return at += 4, c;
}

/// Bytes of the first character of a text that is not empty.
inline std::size_t first_character(std::string_view text) {
  const char* at = text.data();
  next_code_point(at);
  return static_cast<std::size_t>(at - text.data());
}

inline void append_utf8(std::string& to, char32_t c) {
  const auto put = [&](char32_t byte) { to.push_back(static_cast<char>(byte)); };
  if (c < 0x80) return put(c);
  if (c < 0x800) return put(0xC0 | c >> 6), put(0x80 | (c & 0x3F));
  if (c < 0x10000) return put(0xE0 | c >> 12), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
  put(0xF0 | c >> 18), put(0x80 | (c >> 12 & 0x3F)), put(0x80 | (c >> 6 & 0x3F)),
      put(0x80 | (c & 0x3F));
}

inline std::u32string code_points(std::string_view text) {
  std::u32string all;
  for (const char *at = text.data(), *end = at + text.size(); at < end;)
    all.push_back(next_code_point(at));
  return all;
}

}  // namespace moesh
