#include "moesh/data/packed.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/data/shuffle.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json_lines.h"

namespace moesh::data {

void Corpus::add(const std::string& document) {
  if (document.empty()) return;
  starts.push_back(std::ssize(tokens));
  for (unsigned char byte : document) tokens.push_back(byte);
  tokens.push_back(kEndOfDocument);
}

Corpus read_text_corpus(const std::string& path) {
  Corpus corpus{.name = path};
  corpus.add(formats::read_file(path, ErrorKind::data));
  return corpus;
}

Corpus read_jsonl_corpus(const std::string& path) {
  Corpus corpus{.name = path};
  std::istringstream lines(formats::read_file(path, ErrorKind::data));
  formats::each_json_text(lines, path, "text", [&](const std::string& text) { corpus.add(text); });
  return corpus;
}

PackedDataset::PackedDataset(Corpus corpus, std::int64_t sequence_length, std::uint64_t seed,
                             bool shuffle)
    : corpus_(std::move(corpus)),
      sequence_length_(sequence_length),
      num_sequences_(0),
      seed_(seed),
      shuffle_(shuffle) {
  MOESH_CHECK(sequence_length >= 1, ErrorKind::config, "data: sequence_length is ", sequence_length,
              "; it takes 1 or more");
  const auto num_tokens = std::ssize(corpus_.tokens);
  MOESH_CHECK(num_tokens > 0, ErrorKind::data, corpus_.name,
              " holds no text; name a file with text in data.path");
  MOESH_CHECK(
      num_tokens > sequence_length, ErrorKind::data, corpus_.name, " has ", num_tokens,
      " tokens (bytes, and one at the end of each document), and a sequence of data.sequence_length = ",
      sequence_length, " needs ", sequence_length + 1, "; set data.sequence_length to ",
      num_tokens - 1, " or less, or use more text");
  num_sequences_ = (num_tokens - 1) / sequence_length;
}

Sample PackedDataset::get(std::int64_t index) const {
  MOESH_CHECK(index >= 0, "sample ", index, " of ", corpus_.name);
  const std::int64_t epoch = index / num_sequences_;
  std::int64_t sequence = index % num_sequences_;
  if (shuffle_)
    sequence = Shuffle(num_sequences_, seed_, detail::concat("data: epoch ", epoch)).at(sequence);

  const auto begin = corpus_.tokens.begin() + sequence * sequence_length_;
  Sample sample{.tokens = std::vector<TokenId>(begin, begin + sequence_length_ + 1)};
  // The document of the first token is the last one that starts at it or before.
  auto next =
      std::upper_bound(corpus_.starts.begin(), corpus_.starts.end(), sequence * sequence_length_);
  for (std::int64_t t = 0; t <= sequence_length_; ++t) {
    if (next != corpus_.starts.end() && sequence * sequence_length_ + t == *next) ++next;
    sample.documents.push_back(next - corpus_.starts.begin() - 1);
  }
  return sample;
}

std::string PackedDataset::describe() const {
  return detail::concat(corpus_.name, ": ", corpus_.starts.size(),
                        corpus_.starts.size() == 1 ? " document, " : " documents, ",
                        corpus_.tokens.size(), " tokens, ", num_sequences_, " sequences of ",
                        sequence_length_);
}

}  // namespace moesh::data
