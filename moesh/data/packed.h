#pragma once
// Documents from a file, packed into sequences of equal length without padding.

#include "moesh/data/dataset.h"

namespace moesh::data {

/// Text is read as bytes, tokens 0 to 255, and kEndOfDocument closes every document.
constexpr TokenId kEndOfDocument = 256;
constexpr std::int64_t kNumByteTokens = 257;

/// The documents of a file one after the other.
struct Corpus {
  std::string name;
  std::vector<TokenId> tokens;
  std::vector<std::int64_t> starts;  // the first token of each document
  std::int64_t vocab_size = kNumByteTokens;
  /// Adds the bytes of a text and kEndOfDocument. An empty text adds nothing.
  void add(const std::string& document);
};

/// The whole file is one document.
Corpus read_text_corpus(const std::string& path);
/// Each line is a document: {"text": "..."}.
Corpus read_jsonl_corpus(const std::string& path);

/// Sequence i holds the tokens i * L to i * L + L, so that every token but the first is a label
/// once; what is left at the end is dropped. After the last sequence the next epoch begins, in
/// another order if shuffled.
class PackedDataset : public Dataset {
 public:
  PackedDataset(Corpus corpus, std::int64_t sequence_length, std::uint64_t seed, bool shuffle);

  Sample get(std::int64_t index) const override;
  std::int64_t sequence_length() const override { return sequence_length_; }
  std::int64_t vocab_size() const override { return corpus_.vocab_size; }
  std::string describe() const override;
  std::int64_t num_sequences() const { return num_sequences_; }

 private:
  Corpus corpus_;
  std::int64_t sequence_length_, num_sequences_;
  std::uint64_t seed_;
  bool shuffle_;
};

}  // namespace moesh::data
