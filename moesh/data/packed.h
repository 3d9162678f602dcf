#pragma once
// Sequences of documents from a file: one behind the other and cut, or packed whole.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moesh/base/random.h"
#include "moesh/data/dataset.h"
#include "moesh/formats/token_file.h"

namespace moesh::data {

/// A permutation of 0 .. size - 1 that depends only on seed and stream: a Feistel network, applied
/// again until the result is below size.
class Shuffle {
 public:
  Shuffle(std::int64_t size, std::uint64_t seed, std::string_view stream);
  std::int64_t at(std::int64_t place) const;

 private:
  std::uint64_t once(std::uint64_t value) const;

  std::int64_t size_;
  int half_bits_ = 0;
  Random random_;
};

/// The order in which a run goes through `size` items, epoch after epoch: each epoch in another
/// random order, or always in their own order.
struct Epochs {
  std::int64_t size = 0;
  std::uint64_t seed = 0;
  bool shuffle = true;

  /// The sample at an index of the run.
  std::int64_t at(std::int64_t index) const;
};

// Documents from a file, one behind the other, cut into sequences of equal length.

/// Text is read as bytes, tokens 0 to 255, and kEndOfDocument closes every document.
constexpr TokenId kEndOfDocument = 256;
constexpr std::int64_t kNumByteTokens = 257;

/// Tokens of documents, one behind the other, wherever they lie.
class TokenStore {
 public:
  virtual ~TokenStore() = default;
  virtual const std::string& name() const = 0;
  /// "tokens", for messages; how they are made of text where moesh makes them.
  virtual const char* unit() const = 0;
  virtual std::int64_t vocab_size() const = 0;
  virtual std::int64_t num_tokens() const = 0;
  virtual std::int64_t num_documents() const = 0;
  /// The first token of a document.
  virtual std::int64_t start(std::int64_t document) const = 0;
  /// Tokens from `begin` on. One that is not in the vocabulary is an Error (data) that names file
  /// and position.
  virtual void copy(std::int64_t begin, std::span<TokenId> to) const = 0;
  /// Whether it has a loss mask, and the mask of the tokens from `begin` on (Sample::trained).
  virtual bool has_mask() const { return false; }
  virtual void copy_mask(std::int64_t /*begin*/, std::span<std::uint8_t> /*to*/) const {}
};

/// Appends tokens [begin, begin + count) of a store to a sample, with their loss mask where the
/// store has one. Their document number is left to the caller.
void append_tokens(const TokenStore& store, std::int64_t begin, std::int64_t count, Sample& sample);

/// The documents of a text one after the other, in memory.
class Corpus final : public TokenStore {
 public:
  explicit Corpus(std::string name, std::int64_t vocab_size = kNumByteTokens)
      : name_(std::move(name)), vocab_size_(vocab_size) {}
  /// Adds the bytes of a text and kEndOfDocument. An empty text adds nothing.
  void add(const std::string& document);

  const std::string& name() const override { return name_; }
  const char* unit() const override {
    return "tokens (bytes, and one at the end of each document)";
  }
  std::int64_t vocab_size() const override { return vocab_size_; }
  std::int64_t num_tokens() const override { return std::ssize(tokens); }
  std::int64_t num_documents() const override { return std::ssize(starts); }
  std::int64_t start(std::int64_t document) const override {
    return starts[static_cast<std::size_t>(document)];
  }
  void copy(std::int64_t begin, std::span<TokenId> to) const override {
    std::copy_n(tokens.begin() + begin, to.size(), to.begin());
  }

  std::vector<TokenId> tokens;
  std::vector<std::int64_t> starts;  // the first token of each document

 private:
  std::string name_;
  std::int64_t vocab_size_;
};

/// The whole file is one document.
Corpus read_text_corpus(const std::string& path);
/// Each line is a document: {"text": "..."}.
Corpus read_jsonl_corpus(const std::string& path);
/// A file of token ids.
std::shared_ptr<const TokenStore> make_store(formats::TokenFile file, std::int64_t vocab_size);

/// Sequence i holds the tokens i * L to i * L + L, so that every token but the first is a label
/// once; what is left at the end is dropped. After the last sequence the next epoch begins, in
/// another order if shuffled.
class PackedDataset : public Dataset {
 public:
  PackedDataset(std::shared_ptr<const TokenStore> tokens, std::int64_t sequence_length,
                std::uint64_t seed, bool shuffle);

  Sample get(std::int64_t index) const override;
  std::int64_t sequence_length() const override { return sequence_length_; }
  std::int64_t vocab_size() const override { return tokens_->vocab_size(); }
  std::string describe() const override;
  std::optional<std::int64_t> size() const override { return epochs_.size; }

 private:
  std::int64_t document_at(std::int64_t token) const;

  std::shared_ptr<const TokenStore> tokens_;
  std::int64_t sequence_length_;
  Epochs epochs_;
};

// Documents packed whole into sequences, with padding where no further document fits.

/// Tokens [begin, begin + length) of a store, of one document.
struct Piece {
  std::int64_t begin, length;
};

/// The pieces in groups of at most `capacity` tokens: the longest first, each into the group in
/// which it leaves the least room. No piece is longer than `capacity`.
std::vector<std::vector<Piece>> best_fit(std::vector<Piece> pieces, std::int64_t capacity);

/// A document of more than L + 1 tokens is cut: each piece begins with the last token of the piece
/// before, so that every token of a document except its first is a label once. The rest of a
/// sequence is padding, without labels. Documents are packed with those near them in the file,
/// kWindow at a time, so no list of all sequences is needed.
class BestFitDataset : public Dataset {
 public:
  static constexpr std::int64_t kWindow = 1024;

  BestFitDataset(std::shared_ptr<const TokenStore> tokens, std::int64_t sequence_length,
                 std::uint64_t seed, bool shuffle);

  Sample get(std::int64_t index) const override;
  std::int64_t sequence_length() const override { return sequence_length_; }
  std::int64_t vocab_size() const override { return tokens_->vocab_size(); }
  std::optional<std::int64_t> size() const override { return epochs_.size; }
  std::string describe() const override;

 private:
  /// The sequences of the documents [number * kWindow, ..): those that a piece of a long document
  /// fills by itself, as best fit has them first, which are only counted (a document may have any
  /// length), and those of what is left of each document.
  struct Window {
    std::vector<std::int64_t> starts;       // of its documents
    std::vector<std::int64_t> full_before;  // sequences filled by documents before each; of all
    std::vector<std::vector<Piece>> others;

    std::int64_t num_sequences() const { return full_before.back() + std::ssize(others); }
  };
  Window window(std::int64_t number) const;
  std::vector<Piece> pieces_of(const Window& window, std::int64_t sequence) const;

  std::shared_ptr<const TokenStore> tokens_;
  std::int64_t sequence_length_;
  std::vector<std::int64_t> sequences_before_;  // each window; the last: of all
  std::int64_t num_filled_ = 0;                 // tokens that are no padding
  Epochs epochs_;
};

}  // namespace moesh::data
