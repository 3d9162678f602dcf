#pragma once
// Regular expressions that others wrote, by RE2: no backtracking, whatever the expression.

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace re2 {
class RE2;
}

namespace moesh::formats {

/// An expression in the syntax of RE2. What cannot be matched in linear time (\1 and the like,
/// (?= ), (?! )) is refused. Bytes are letters.
class Pattern {
 public:
  /// Throws Error (config) where the text is not an expression, or needs too much memory.
  explicit Pattern(std::string_view text);

  /// Whether any part of `text` matches.
  bool is_in(std::string_view text) const;
  /// Every match in `text`, from the left, replaced: $1 is the first group, $& the whole match, $$
  /// a dollar. Throws Error (config) if the group does not exist, or the text is longer than
  /// `kMaxText`: a search for each letter takes quadratic time.
  std::string replace(std::string_view text, std::string_view replacement) const;

  static constexpr std::size_t kMaxText = 10'000;

 private:
  std::shared_ptr<const re2::RE2> expression_;
};

}  // namespace moesh::formats
