#include "moesh/formats/checksum.h"

#include <algorithm>
#include <charconv>

#include "moesh/base/error.h"
#include "moesh/formats/name.h"

namespace moesh::formats {
namespace {

constexpr std::size_t kDigits = 16;

bool is_digit(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }

}  // namespace

std::string checksum_text(std::uint64_t checksum) {
  std::string text(kDigits, '0');
  for (auto digit = text.rbegin(); digit != text.rend(); ++digit, checksum >>= 4)
    *digit = "0123456789abcdef"[checksum & 0xf];
  return text;
}

std::uint64_t parse_checksum(std::string_view text) {
  MOESH_CHECK(text.size() == kDigits && std::all_of(text.begin(), text.end(), is_digit),
              ErrorKind::data, shown(text),
              " is not a checksum, which has 16 digits, 0 to 9 and a to f");
  std::uint64_t checksum = 0;
  std::from_chars(text.data(), text.data() + text.size(), checksum, 16);
  return checksum;
}

}  // namespace moesh::formats
