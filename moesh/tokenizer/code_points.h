#pragma once
// What Unicode says of code points (tables), and sets of them.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace moesh::tokenizer {

// The letters, digits and spaces of the Python package `tokenizers`: asked of the package,
// code point by code point (tools/make_unicode_tables.py), since its parts have several versions of
// Unicode.

/// First and last.
struct CodePointRange {
  char32_t first, last;
  bool operator==(const CodePointRange&) const = default;
};

}  // namespace moesh::tokenizer

namespace moesh::tokenizer::tables {

struct CategoryRun {
  char32_t first;
  std::uint8_t category;  // of kCategoryNames
};
struct CombiningClass {
  char32_t code_point;
  std::uint8_t value;
};
struct Decomposition {
  char32_t code_point, first, second;  // second is 0 where there is only one
  bool composes;                       // NFC puts it together again
};

extern const std::span<const std::string_view> kCategoryNames;  // "Lu"
extern const std::span<const CategoryRun> kCategories;
extern const std::span<const CodePointRange> kPatternSpaces, kPatternWords;  // \s and \w
extern const std::span<const CodePointRange> kNumeric, kPunctuation, kSpaces, kWords;
extern const std::span<const CombiningClass> kCombiningClasses;
extern const std::span<const Decomposition> kDecompositions;

}  // namespace moesh::tokenizer::tables

namespace moesh::tokenizer {

// Sets of code points, and tables which say for each code point in which sets it is.

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
