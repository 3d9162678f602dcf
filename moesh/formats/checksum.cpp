#include "moesh/formats/checksum.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "moesh/base/error.h"
#include "moesh/formats/name.h"

namespace moesh::formats {
namespace {

constexpr std::size_t kDigits = 16;

constexpr std::uint64_t kWord = sizeof(std::uint64_t);
static_assert(kBlockBytes % kWord == 0, "no word is in two blocks");

// What a word counts for, by its place in the file: odd, so that no change of the word is lost.
std::uint64_t factor(std::uint64_t place) {
  place = (place + 1) * 0x9e3779b97f4a7c15;
  place = (place ^ (place >> 30)) * 0xbf58476d1ce4e5b9;
  place = (place ^ (place >> 27)) * 0x94d049bb133111eb;
  return (place ^ (place >> 31)) | 1;
}

bool is_digit(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }

}  // namespace

void BlockSums::add(std::uint64_t offset, std::string_view bytes) {
  if (bytes.empty()) return;
  const auto last = (offset + bytes.size() - 1) / kBlockBytes;
  if (sums_.size() <= last) sums_.resize(last + 1, 0);
  const auto add_some = [&](std::uint64_t skipped, std::size_t count) {
    std::uint64_t word = 0;
    std::memcpy(reinterpret_cast<char*>(&word) + skipped, bytes.data(), count);
    // By halves: of a whole word the product would keep no more of bit 63 than its parity.
    const auto place = 2 * (offset / kWord);
    sums_[offset / kBlockBytes] +=
        (word & 0xffffffff) * factor(place) + (word >> 32) * factor(place + 1);
    offset += count;
    bytes.remove_prefix(count);
  };
  // A word of which only some bytes are here: the others count as 0, and are added by whoever has
  // them.
  if (const auto skipped = offset % kWord; skipped != 0)
    add_some(skipped, std::min<std::size_t>(bytes.size(), kWord - skipped));
  while (bytes.size() >= kWord) add_some(0, kWord);
  if (!bytes.empty()) add_some(0, bytes.size());
}

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
