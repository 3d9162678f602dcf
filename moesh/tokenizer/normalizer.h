#pragma once
// Changes of a text before it is split, and where the bytes of a changed text come from.

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "moesh/tokenizer/pattern.h"
#include "moesh/tokenizer/sections.h"

namespace moesh::tokenizer {

// Where the bytes of a text come from that was changed on its way to the tokens.

/// Bytes [begin, end) of a text.
struct ByteRange {
  std::size_t begin = 0, end = 0;
  bool operator==(const ByteRange&) const = default;
};

/// For each byte of a changed text, the bytes of the text before that it stands for. Empty: nothing
/// was changed. Callers that do not ask for origins give null.
using Origins = std::vector<ByteRange>;

/// Bytes [begin, end) stay as they are.
inline void keep(Origins* origins, std::size_t begin, std::size_t end) {
  if (origins)
    for (std::size_t i = begin; i < end; ++i) origins->push_back({i, i + 1});
}
/// Bytes [begin, end) become `count` others.
inline void replace(Origins* origins, std::size_t begin, std::size_t end, std::size_t count) {
  if (origins) origins->insert(origins->end(), count, {begin, end});
}
/// The original bytes of [begin, end) of the changed text; not empty.
inline ByteRange origin_of(const Origins& origins, ByteRange of) {
  return origins.empty() ? of : ByteRange{origins[of.begin].begin, origins[of.end - 1].end};
}
/// A change after an earlier one, as one.
inline Origins after(const Origins& earlier, Origins later) {
  for (ByteRange& origin : later) origin = origin_of(earlier, origin);
  return later;
}

// Changes of a text before it is split: Unicode normal forms, a prefix, replacements.

/// Every occurrence of a text, or of what a pattern matches, becomes `content`. Also a decoder.
class Replacement {
 public:
  explicit Replacement(const JsonSection& section);
  std::string_view apply(std::string_view text, std::string& buffer,
                         Origins* origins = nullptr) const;

 private:
  std::variant<std::string, SplitPattern> what_;
  std::string content_;
};

/// A text or a pattern, as Split and Replace have them: {"String": "x"} or {"Regex": "x"}.
std::variant<std::string, SplitPattern> read_what_to_find(const JsonSection& section);

/// Where a text or a pattern occurs in one text.
class Occurrences {
 public:
  Occurrences(const std::variant<std::string, SplitPattern>& what, std::string_view text);
  /// The first one at `from` or behind it; `from` does not go back.
  std::optional<Match> next(std::size_t from);

 private:
  const std::string* literal_;
  std::string_view text_;
  std::optional<Matches> matches_;  // of a pattern
};

class Normalizer {
 public:
  Normalizer() = default;  // changes nothing
  explicit Normalizer(const JsonSection& section);

  /// The result is `text` itself, or lies in one of the buffers. `origins` becomes that of all
  /// steps.
  std::string_view apply(std::string_view text, std::string (&buffers)[2],
                         Origins* origins = nullptr) const;

 private:
  /// The result is `text` itself where nothing changes, or lies in `buffer`; then its origins are
  /// appended.
  using Step =
      std::function<std::string_view(std::string_view text, std::string& buffer, Origins* origins)>;
  void add(const JsonSection& section);

  std::vector<Step> steps_;
};

}  // namespace moesh::tokenizer
