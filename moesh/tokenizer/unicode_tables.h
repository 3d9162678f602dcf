#pragma once
// The letters, digits and spaces of the Python package `tokenizers`: asked of the package,
// code point by code point (tools/make_unicode_tables.py), since its parts have several versions of
// Unicode.

#include <cstddef>
#include <cstdint>

namespace moesh::tokenizer {

/// First and last.
struct CodePointRange {
  char32_t first, last;
  bool operator==(const CodePointRange&) const = default;
};

}  // namespace moesh::tokenizer

namespace moesh::tokenizer::tables {

/// General categories by their names in Unicode.
enum class Category : std::uint8_t {
  Lu,
  Ll,
  Lt,
  Lm,
  Lo,
  Mn,
  Mc,
  Me,
  Nd,
  Nl,
  No,
  Pc,
  Pd,
  Ps,
  Pe,
  Pi,
  Pf,
  Po,
  Sm,
  Sc,
  Sk,
  So,
  Zs,
  Zl,
  Zp,
  Cc,
  Cf,
  Cs,
  Co,
  Cn
};
constexpr const char* kCategoryNames[] = {
    "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe",
    "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co", "Cn"};

struct CategoryRun {
  char32_t first;
  Category category;
};
struct CombiningClass {
  char32_t code_point;
  std::uint8_t value;
};
struct Decomposition {
  char32_t code_point, first, second;  // second is 0 where there is only one
  bool composes;                       // NFC puts it together again
};

extern const CategoryRun kCategories[];
extern const CodePointRange kPatternSpaces[], kPatternWords[], kNumeric[], kPunctuation[],
    kSpaces[], kWords[];
extern const CombiningClass kCombiningClasses[];
extern const Decomposition kDecompositions[];
extern const std::size_t kCategoriesSize, kPatternSpacesSize, kPatternWordsSize, kNumericSize,
    kPunctuationSize, kSpacesSize, kWordsSize, kCombiningClassesSize, kDecompositionsSize;

}  // namespace moesh::tokenizer::tables
