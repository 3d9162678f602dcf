#pragma once
// Where the bytes of a text come from that was changed on its way to the tokens.

#include <cstddef>
#include <vector>

namespace moesh::tokenizer {

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

}  // namespace moesh::tokenizer
