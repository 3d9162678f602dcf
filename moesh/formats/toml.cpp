#include "moesh/formats/toml.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "moesh/formats/file.h"

namespace moesh::formats {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          std::array<char, 8> code;
          std::snprintf(code.data(), code.size(), "\\u%04X",
                        static_cast<unsigned>(static_cast<unsigned char>(c)));
          out += code.data();
        } else {
          out += c;
        }
    }
  }
  return out + '"';
}

std::string shortest(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::array<char, 32> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  std::string text(digits.data(), end);
  if (const auto e = text.find('e'); e != std::string::npos && text[e + 2] == '0')
    text.erase(e + 2, 1);  // 1e-08
  if (text.find_first_of(".e") == std::string::npos)
    text += ".0";  // 1 would read back as an integer
  return text;
}

}  // namespace

std::vector<TomlEntry> read_toml(const std::string& path) {
  return parse_toml(read_file_or_pipe(path, ErrorKind::config, kMaxTomlBytes), path);
}

std::string to_toml(const TomlValue& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* whole = std::get_if<std::int64_t>(&value)) return std::to_string(*whole);
  if (const auto* real = std::get_if<double>(&value)) return shortest(*real);
  return quoted(std::get<std::string>(value));
}

}  // namespace moesh::formats
