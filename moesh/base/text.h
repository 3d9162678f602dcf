#pragma once
// Numbers and lists as people read them.

#include <cstdint>
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

}  // namespace moesh
