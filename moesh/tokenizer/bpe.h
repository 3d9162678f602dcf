#pragma once
// Byte-pair encoding: pieces of text as token ids, by merges.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "moesh/tokenizer/sections.h"

namespace moesh::tokenizer {

// Bytes written as letters, as byte-level tokenizers do since GPT-2: a byte that prints stands for
// itself, and the others follow from U+0100 on.

char32_t letter_of_byte(unsigned char byte);

/// The bytes that the letters stand for; nothing where one of them stands for none.
std::optional<std::string> bytes_of_letters(std::string_view text);

// Byte-pair encoding: the pieces of a word are merged pair by pair, the pair that was learned first
// before all others.

using TokenId = std::int32_t;
constexpr TokenId kNoToken = -1;

/// The ids of words that came before, so that a frequent word is not merged again: one place for
/// each hash, the last word wins. Of one thread and of one tokenizer.
class WordCache {
 public:
  /// With room for two to the power of `bits` words.
  explicit WordCache(int bits = 16) : bits_(bits), entries_(std::size_t{1} << bits) {}

  struct CachedWord {  // 64 bytes
    static constexpr std::size_t kMaxBytes = 30, kMaxIds = 8;
    std::uint8_t num_bytes = 0, num_ids = 0;
    char bytes[kMaxBytes];
    TokenId ids[kMaxIds];
  };
  CachedWord& of(std::uint64_t hash) { return entries_[hash >> (64 - bits_)]; }

  std::vector<TokenId> symbols;  // of the word that is being merged: its memory is reused

 private:
  int bits_;
  std::vector<CachedWord> entries_;
};

class Bpe {
 public:
  /// `byte_level`: the tokens write bytes as letters (see letter_of_byte), and words are given as
  /// bytes.
  Bpe(const JsonSection& section, bool byte_level);

  /// Bytes of the word that each token stands for, in their order.
  using Widths = std::vector<std::size_t>;

  /// Appends the ids of a word, and their widths where they are asked for.
  void encode(std::string_view word, WordCache& cache, std::vector<TokenId>& ids,
              Widths* widths = nullptr) const;

  /// As the file has them.
  const std::unordered_map<std::string, TokenId>& vocabulary() const { return vocabulary_; }

 private:
  struct BpeMerge {
    std::uint64_t pair = kNoPair;  // left id << 32 | right id
    std::uint32_t rank = 0;
    TokenId merged = kNoToken;
  };
  static constexpr std::uint64_t kNoPair = ~std::uint64_t{0};
  struct Symbol;

  void read_vocabulary(const JsonSection& section);
  void read_merges(const JsonSection& section);
  void add_merge(const std::string& left, const std::string& right, std::uint32_t rank,
                 const std::string& where);
  void find_word_starts();
  const BpeMerge* find_merge(TokenId left, TokenId right) const;
  void encode_part(std::string_view word, WordCache& cache, std::vector<TokenId>& ids,
                   Widths* widths) const;
  void merge_word(std::string_view word, WordCache& cache, std::vector<TokenId>& ids,
                  Widths* widths) const;
  void symbols_of(std::string_view word, std::vector<TokenId>& symbols, Widths* widths) const;
  void merge_few(std::vector<TokenId>& symbols, Widths* widths) const;
  void merge_many(std::vector<TokenId>& symbols, Widths* widths) const;

  bool byte_level_;
  std::unordered_map<std::string, TokenId> vocabulary_;
  std::unordered_map<std::string_view, TokenId> words_;  // with bytes as words have them
  std::vector<std::string> word_texts_;                  // what the keys of words_ point to
  std::unordered_map<char32_t, TokenId> characters_;     // tokens of one character
  TokenId bytes_[256];                                   // of a byte level, or of a fallback
  std::vector<BpeMerge> merges_;                         // by hash; a power of two
  TokenId unknown_ = kNoToken;
  bool has_unknown_ = false, fuse_unknown_ = false, byte_fallback_ = false, ignore_merges_ = false;
  bool starts_words_ = false;  // see find_word_starts
};

}  // namespace moesh::tokenizer
