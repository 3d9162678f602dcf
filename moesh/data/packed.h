#pragma once
// Text from a file, as bytes, packed into sequences of equal length without padding.

#include "moesh/data/dataset.h"

namespace moesh::data {

/// The documents of a file one after the other, each closed by kEndOfDocument.
struct Corpus {
  std::string name;
  std::vector<std::uint16_t> tokens;
  std::vector<std::int64_t> starts;  // the first token of each document
  /// An empty text is no document.
  void add(const std::string& document);
};

/// The whole file is one document.
Corpus read_text_corpus(const std::string& path);
/// A document a line: {"text": "..."}.
Corpus read_jsonl_corpus(const std::string& path);

/// Sequence i holds the tokens i * L to i * L + L, so that every token but the first is a label
/// once; what is left at the end is dropped. After the last sequence the next epoch begins, in
/// another order if shuffled.
class PackedDataset : public Dataset {
 public:
  PackedDataset(Corpus corpus, std::int64_t sequence_length, std::uint64_t seed, bool shuffle);

  Sample get(std::int64_t index) const override;
  std::int64_t sequence_length() const override { return sequence_length_; }
  std::int64_t vocab_size() const override { return kNumByteTokens; }
  std::string describe() const override;
  std::int64_t num_sequences() const { return num_sequences_; }

 private:
  Corpus corpus_;
  std::int64_t sequence_length_, num_sequences_;
  std::uint64_t seed_;
  bool shuffle_;
};

}  // namespace moesh::data
