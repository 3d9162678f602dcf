#pragma once
// Splits a text into words: no token crosses the border of a word.

#include <deque>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "moesh/tokenizer/code_points.h"
#include "moesh/tokenizer/normalizer.h"
#include "moesh/tokenizer/pattern.h"
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
  enum class Behavior { removed, isolated, contiguous, merged_with_previous, merged_with_next };
  struct Split {
    std::variant<std::string, SplitPattern> what;
    Behavior behavior;
    bool invert = false;
  };
  struct SetSplit {  // what Split does, for single code points of a set
    CodePointMasks set;
    Behavior behavior;
  };
  struct WordsAndOthers {  // words, and other characters that are not white space
    CodePointMasks sets;
  };
  struct PrefixSpace {};
  struct Metaspace {
    std::string replacement;
    enum class PrependScheme { always, first, never } prepend;
    bool split;
  };
  struct MatchedText {
    std::size_t begin, end;
    bool is_match;
  };
  using Step = std::variant<Split, SetSplit, WordsAndOthers, PrefixSpace, Metaspace>;

  void add(const JsonSection& section);
  void add_byte_level(const JsonSection& section);
  static Behavior read_behavior(const JsonSection& section, const char* otherwise);
  static Metaspace read_metaspace(const JsonSection& section);
  static void run(const Split& step, WordBuffers& buffers, const Word& word);
  static void run(const SetSplit& step, WordBuffers& buffers, const Word& word);
  static void run(const WordsAndOthers& step, WordBuffers& buffers, const Word& word);
  static void run(const PrefixSpace& step, WordBuffers& buffers, const Word& word);
  static void run(const Metaspace& step, WordBuffers& buffers, const Word& word);
  static ChangedText& change(const Word& word, WordBuffers& buffers, std::string_view prefix,
                             std::string_view for_space = " ");
  static void add_parts(const std::vector<MatchedText>& parts, Behavior behavior, const Word& word,
                        std::vector<Word>& to);

  std::vector<Step> steps_;
  bool is_byte_level_ = false;
};

}  // namespace moesh::tokenizer
