#pragma once
// Numbers and lists as people read them.

#include <cstdint>
#include <string>
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

/// "a", "a or b", "a, b or c".
inline std::string joined_by_or(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i)
    text += (i == 0 ? "" : i + 1 < names.size() ? ", " : " or ") + names[i];
  return text;
}

}  // namespace moesh
