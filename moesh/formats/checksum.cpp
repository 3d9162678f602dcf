#include "moesh/formats/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>

#include "moesh/base/error.h"
#include "moesh/formats/name.h"

namespace moesh::formats {
namespace {

constexpr std::size_t kDigits = 16;

// A word is what one product counts for. Its factor is that of its place in a stretch, from a table
// that stays in the nearest cache, times that of the stretch: both odd, so that no change of a word
// is lost.
using Word = std::uint32_t;
constexpr std::uint64_t kWord = sizeof(Word);
constexpr std::uint64_t kStretchWords = 1024, kStretch = kStretchWords * kWord;
static_assert(kBlockBytes % kStretch == 0, "no stretch is in two blocks");

constexpr std::uint64_t odd(std::uint64_t place) {
  place = (place + 1) * 0x9e3779b97f4a7c15;
  place = (place ^ (place >> 30)) * 0xbf58476d1ce4e5b9;
  place = (place ^ (place >> 27)) * 0x94d049bb133111eb;
  return (place ^ (place >> 31)) | 1;
}

constexpr std::array<Word, kStretchWords> kInStretch = [] {
  std::array<Word, kStretchWords> factors{};
  for (std::size_t i = 0; i < kStretchWords; ++i) factors[i] = static_cast<Word>(odd(i));
  return factors;
}();

// A product of 32 by 32 bits loses nothing, and the sum of a stretch is multiplied once. All of a
// stretch, which is the most of a file, has a loop of known length: the compiler unrolls it into
// vectors.
std::uint64_t sum_of(const char* bytes, std::size_t first, std::size_t count) {
  std::uint64_t sum = 0;
  const auto add = [&](std::size_t i) {
    Word word;
    std::memcpy(&word, bytes + i * kWord, kWord);
    sum += std::uint64_t{word} * kInStretch[first + i];
  };
  if (count == kStretchWords)
    for (std::size_t i = 0; i < kStretchWords; ++i) add(i);
  else
    for (std::size_t i = 0; i < count; ++i) add(i);
  return sum;
}

bool is_hex_digit(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }

}  // namespace

std::uint64_t hash_block(std::span<const std::byte> block) {
  return XXH3_64bits(block.data(), block.size());
}

void BlockSums::add(std::uint64_t offset, std::string_view bytes) {
  if (bytes.empty()) return;
  const auto last = (offset + bytes.size() - 1) / kBlockBytes;
  if (blocks_.size() <= last) blocks_.resize(last + 1);
  const auto add_words = [&](const char* words, std::size_t num_words, std::size_t num_bytes) {
    BlockSum& block = blocks_[offset / kBlockBytes];
    block.sum += sum_of(words, offset % kStretch / kWord, num_words) * odd(~(offset / kStretch));
    block.num_bytes += num_bytes;
    offset += num_bytes;
    bytes.remove_prefix(num_bytes);
  };
  // A word of which only some bytes are here: the others count as 0, and are added by the writer
  // that has them.
  const auto add_some = [&](std::size_t skipped, std::size_t count) {
    char word[kWord] = {};
    std::memcpy(word + skipped, bytes.data(), count);
    add_words(word, 1, count);
  };
  if (const auto skipped = offset % kWord; skipped != 0)
    add_some(skipped, std::min<std::size_t>(bytes.size(), kWord - skipped));
  while (bytes.size() >= kWord) {
    const auto count = std::min<std::size_t>(bytes.size(), kStretch - offset % kStretch) / kWord;
    add_words(bytes.data(), count, count * kWord);
  }
  if (!bytes.empty()) add_some(0, bytes.size());
}

std::string checksum_text(std::uint64_t checksum) {
  std::string text(kDigits, '0');
  for (auto digit = text.rbegin(); digit != text.rend(); ++digit, checksum >>= 4)
    *digit = "0123456789abcdef"[checksum & 0xf];
  return text;
}

std::uint64_t parse_checksum(std::string_view text) {
  MOESH_CHECK(text.size() == kDigits && std::all_of(text.begin(), text.end(), is_hex_digit),
              ErrorKind::data, shown(text),
              " is not a checksum, which has 16 digits, 0 to 9 and a to f");
  std::uint64_t checksum = 0;
  std::from_chars(text.data(), text.data() + text.size(), checksum, 16);
  return checksum;
}

}  // namespace moesh::formats
