#pragma once
// Sets of code points, and tables which say for each code point in which sets it is.

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "moesh/tokenizer/unicode_tables.h"

namespace moesh::tokenizer {

constexpr char32_t kLastCodePoint = 0x10FFFF;

/// Sorted ranges that do not touch each other.
class CodePointSet {
 public:
  CodePointSet() = default;
  explicit CodePointSet(std::span<const CodePointRange> ranges);
  bool operator==(const CodePointSet&) const = default;

  const std::vector<CodePointRange>& ranges() const { return ranges_; }
  void add(char32_t first, char32_t last);
  void add(const CodePointSet& other);
  CodePointSet complement() const;

 private:
  std::vector<CodePointRange> ranges_;
};

/// \p{name}: a general category (Lu) or a group of them (L); nothing if there is none of that name.
std::optional<CodePointSet> category_set(std::string_view name);
CodePointSet pattern_spaces();  // \s of a split pattern
CodePointSet pattern_words();   // \w

/// Bit i of the mask of a code point: whether it is in set i. At most 32 sets.
class CodePointMasks {
 public:
  CodePointMasks() = default;
  explicit CodePointMasks(std::span<const CodePointSet> sets);
  std::uint32_t operator[](char32_t c) const {
    return masks_[static_cast<std::size_t>(blocks_[c >> 8]) << 8 | (c & 0xFF)];
  }

 private:
  std::vector<std::uint16_t> blocks_;  // equal blocks of 256 code points are stored once
  std::vector<std::uint32_t> masks_;
};

}  // namespace moesh::tokenizer
