#pragma once
// Regular expressions that others wrote, in bounded time: no backtracking, whatever the expression.

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moesh::formats {

/// An expression as std::regex and JavaScript have it: . [a-z] [^a] \d \w \s \b ^ $ ( ) (?: ) | and
/// * + ? {m,n}, each also with a ? behind it. What cannot be matched in linear time (\1 and the
/// like, (?= ), (?! )) is refused. Bytes are letters.
class Pattern {
 public:
  /// Throws Error (config) where the text is none, or a larger one than anybody writes.
  explicit Pattern(std::string_view text);

  /// Whether any part of `text` matches.
  bool is_in(std::string_view text) const;
  /// Every match in `text`, from the left, replaced: $1 is the first group, $& the whole match, $$
  /// a dollar. Throws Error (config) where that would take more than `kMaxWork` steps.
  std::string replace(std::string_view text, std::string_view replacement) const;

  static constexpr std::size_t kMaxLength = 1000, kMaxGroups = 20, kMaxProgram = 20'000;
  static constexpr std::uint64_t kMaxWork = 5'000'000;

 private:
  friend class PatternCompiler;
  friend class PatternMatcher;
  using Letters = std::bitset<256>;
  enum class Op : std::uint8_t { letter, split, jump, save, begin, end, boundary, inside, match };
  // letter: one of sets[x]; split: first x, then y; jump: to x; save: the position into slot x.
  struct Step {
    Op op;
    std::size_t x = 0, y = 0;
  };
  std::vector<Step> program_;
  std::vector<Letters> sets_;
  std::size_t num_groups_ = 0;  // without the whole match
};

}  // namespace moesh::formats
