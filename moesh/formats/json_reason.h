#pragma once
// Why nlohmann/json refused a text, in words that may be printed.

#include <exception>
#include <string>

namespace moesh::formats {

/// "[json.exception.parse_error.101] parse error at line 1, column 9: ..." without what every
/// reader would skip. The text may quote what was read: it is shortened, and bytes that do not
/// print become '?'.
inline std::string json_reason(const std::exception& e) {
  constexpr std::size_t kLongest = 300;
  std::string text = e.what();
  if (const auto end = text.find("] "); end != std::string::npos) text.erase(0, end + 2);
  if (text.size() > kLongest) text.replace(kLongest, std::string::npos, "...");
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x7f) c = '?';
  return text;
}

}  // namespace moesh::formats
