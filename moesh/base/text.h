#pragma once
// Texts: numbers and lists as people read them, code points, and what is safe to print.

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moesh {

/// 1234567 as "1,234,567"; not negative.
inline std::string with_commas(std::int64_t n) {
  const std::string digits = std::to_string(n);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text.push_back(',');
    text.push_back(digits[i]);
  }
  return text;
}

/// "1 step", "2,000 steps".
inline std::string counted(std::int64_t n, const std::string& one) {
  return with_commas(n) + " " + one + (n == 1 ? "" : "s");
}

/// Alphabetical, but numbers in names count as numbers: layers.2 is before layers.10.
inline bool in_natural_order(std::string_view a, std::string_view b) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  // The number at the beginning, without the zeros in front, which would make it longer.
  const auto take_number = [&](std::string_view& text) {
    while (text.size() > 1 && text[0] == '0' && is_digit(text[1])) text.remove_prefix(1);
    std::size_t n = 0;
    while (n < text.size() && is_digit(text[n])) ++n;
    const std::string_view number = text.substr(0, n);
    text.remove_prefix(n);
    return number;
  };
  while (!a.empty() && !b.empty()) {
    if (is_digit(a[0]) && is_digit(b[0])) {
      const std::string_view x = take_number(a), y = take_number(b);
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
    } else {
      if (a[0] != b[0]) return a[0] < b[0];
      a.remove_prefix(1), b.remove_prefix(1);
    }
  }
  return a.empty() && !b.empty();
}

/// "a", "a or b", "a, b or c".
inline std::string joined_by_or(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i)
    text += (i == 0 ? "" : i + 1 < names.size() ? ", " : " or ") + names[i];
  return text;
}

/// The parts between separators, empty ones as well: an empty text is one of them.
std::vector<std::string> split(std::string_view text, char separator);

/// A whole text as a number; nothing where any of it is something else.
template <class T>
std::optional<T> number_of(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// As printf writes it.
__attribute__((format(printf, 1, 2))) std::string formatted(const char* format, ...);

/// "512 B", "1.50 GiB".
std::string size_text(double bytes);
inline std::string size_text(std::int64_t bytes) { return size_text(static_cast<double>(bytes)); }

// Code points of UTF-8 texts. Functions want texts that are valid, unless they say otherwise.

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

// Makes texts safe to print: they contain names that other people chose.

/// The text with what would control a terminal, or mislead its reader, escaped: control characters
/// and bytes that are not UTF-8 as \xNN; those of C1, marks that change the direction of text and
/// separators of lines as \uNNNN. Line ends and tabs stay.
std::string for_terminal(std::string_view text);

/// The same of a name, for one line of output: line ends and tabs are escaped too.
std::string printable(std::string_view name);

}  // namespace moesh
