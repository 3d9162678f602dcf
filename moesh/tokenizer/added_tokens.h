#pragma once
// Tokens that are found in a text as they are, before anything is split: "<|endoftext|>".

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "moesh/tokenizer/bpe.h"
#include "moesh/tokenizer/code_points.h"
#include "moesh/tokenizer/normalizer.h"
#include "moesh/tokenizer/sections.h"

namespace moesh::tokenizer {

struct AddedToken {
  std::string content;
  TokenId id = kNoToken;
  bool single_word = false;  // not within a word
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // and behind it
  bool normalized = false;   // found in the normalised text
  bool special = false;      // left out of decoded text where that is asked for
  std::string pattern;       // what is looked for: the content, normalised if `normalized`
};

/// A piece of a text: an added token, or what is between two of them.
struct TextPiece {
  std::string_view text;
  TokenId id = kNoToken;
};

/// The longest of some texts that begins at a place.
class Trie {
 public:
  void add(std::string_view text, std::int32_t value);
  /// The first place from `from` on where one of them is, the longest of those.
  struct TrieMatch {
    std::size_t begin, end;
    std::int32_t value;
  };
  std::optional<TrieMatch> find(std::string_view text, std::size_t from) const;
  bool empty() const { return nodes_.size() == 1; }

 private:
  struct Node {
    std::unordered_map<char, std::int32_t> next;
    std::int32_t value = -1;
  };
  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::array<bool, 256> starts_{};
};

class AddedTokens {
 public:
  AddedTokens() = default;
  /// The list "added_tokens" of a file; ids must be those that the package gives them.
  AddedTokens(const std::vector<JsonSection>& list, const Bpe& model, const Normalizer& normalizer);

  const std::vector<AddedToken>& all() const { return all_; }
  /// Appends the pieces of a text, those with normalized tokens or those without.
  void split(std::string_view text, bool normalized, std::vector<TextPiece>& pieces) const;

 private:
  static AddedToken read(const JsonSection& section);

  std::vector<AddedToken> all_;
  Trie plain_, normalized_;  // values are places in all_
  CodePointMasks words_and_spaces_;
};

}  // namespace moesh::tokenizer
