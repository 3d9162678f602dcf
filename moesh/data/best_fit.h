#pragma once
// Documents packed whole into sequences, with padding where no further document fits.

#include <memory>
#include <vector>

#include "moesh/data/packed.h"
#include "moesh/data/shuffle.h"

namespace moesh::data {

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
