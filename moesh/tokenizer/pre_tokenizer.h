#pragma once
// Splits a text into words: no token crosses the border of a word.

#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/tokenizer/normalizer.h"
#include "moesh/tokenizer/sections.h"

namespace moesh::tokenizer {

/// A text that is not part of the one that is split.
struct ChangedText {
  std::string text;
  Origins origins;  // in the text that is split, where they are kept
};

struct Word {
  std::string_view text;                 // not empty
  bool at_start;                         // it begins where the whole text begins
  const ChangedText* changed = nullptr;  // what it is part of; null: of the text that is split
};

/// Room that is used again from text to text.
struct WordBuffers {
  std::string_view text;  // that is split
  std::vector<Word> words, others;
  std::deque<ChangedText> changed;  // texts that words point to
  bool keeps_origins = false;       // also where changed texts come from

  /// The bytes of the split text that a part of a word stands for.
  ByteRange origin(const Word& word, ByteRange of) const;
};

class PreTokenizer {
 public:
  PreTokenizer() = default;  // the whole text is one word
  explicit PreTokenizer(const JsonSection& section);

  /// Whether the last step writes the bytes of a word as letters: the model has a token for each
  /// byte. The words here have the bytes themselves.
  bool is_byte_level() const { return is_byte_level_; }

  /// The words of a text, in buffers.words; they last as long as text and buffers.
  void split(std::string_view text, bool at_start, WordBuffers& buffers) const;

 private:
  /// Appends what becomes of a word to buffers.words.
  using Step = std::function<void(const Word& word, WordBuffers& buffers)>;
  void add(const JsonSection& section);

  std::vector<Step> steps_;
  bool is_byte_level_ = false;
};

}  // namespace moesh::tokenizer
