#pragma once
// Numbers as people read them.

#include <cstdint>
#include <string>

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

}  // namespace moesh
