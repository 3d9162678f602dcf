#include "moesh/data/packed.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json.h"

namespace moesh::data {

namespace {

class MemoryStore : public TokenStore {
 public:
  explicit MemoryStore(Corpus corpus) : corpus_(std::move(corpus)) {}
  const std::string& name() const override { return corpus_.name; }
  const char* unit() const override {
    return "tokens (bytes, and one at the end of each document)";
  }
  std::int64_t vocab_size() const override { return corpus_.vocab_size; }
  std::int64_t num_tokens() const override { return std::ssize(corpus_.tokens); }
  std::int64_t num_documents() const override { return std::ssize(corpus_.starts); }
  std::int64_t start(std::int64_t document) const override {
    return corpus_.starts[static_cast<std::size_t>(document)];
  }
  void copy(std::int64_t begin, std::span<TokenId> to) const override {
    std::copy_n(corpus_.tokens.begin() + begin, to.size(), to.begin());
  }

 private:
  Corpus corpus_;
};

class FileStore : public TokenStore {
 public:
  FileStore(formats::TokenFile file, std::int64_t vocab_size)
      : file_(std::move(file)), vocab_size_(vocab_size) {}
  const std::string& name() const override { return file_.name(); }
  const char* unit() const override { return "tokens"; }
  std::int64_t vocab_size() const override { return vocab_size_; }
  std::int64_t num_tokens() const override { return file_.num_tokens(); }
  std::int64_t num_documents() const override { return file_.num_documents(); }
  std::int64_t start(std::int64_t document) const override { return file_.start(document); }
  void copy(std::int64_t begin, std::span<TokenId> to) const override {
    file_.copy(begin, vocab_size_, to);
  }
  bool has_mask() const override { return file_.has_mask(); }
  void copy_mask(std::int64_t begin, std::span<std::uint8_t> to) const override {
    file_.copy_mask(begin, to);
  }

 private:
  formats::TokenFile file_;
  std::int64_t vocab_size_;
};

}  // namespace

std::shared_ptr<const TokenStore> make_store(Corpus corpus) {
  return std::make_shared<MemoryStore>(std::move(corpus));
}
std::shared_ptr<const TokenStore> make_store(formats::TokenFile file, std::int64_t vocab_size) {
  return std::make_shared<FileStore>(std::move(file), vocab_size);
}

void append_tokens(const TokenStore& store, std::int64_t begin, std::int64_t count,
                   Sample& sample) {
  const std::size_t before = sample.tokens.size(), added = static_cast<std::size_t>(count);
  sample.tokens.resize(before + added);
  store.copy(begin, std::span(sample.tokens).subspan(before));
  if (!store.has_mask()) return;
  sample.trained.resize(before + added);
  store.copy_mask(begin, std::span(sample.trained).subspan(before));
}

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
    : PackedDataset(make_store(std::move(corpus)), sequence_length, seed, shuffle) {}

PackedDataset::PackedDataset(std::shared_ptr<const TokenStore> tokens, std::int64_t sequence_length,
                             std::uint64_t seed, bool shuffle)
    : tokens_(std::move(tokens)),
      sequence_length_(sequence_length),
      epochs_{.seed = seed, .shuffle = shuffle} {
  MOESH_CHECK(sequence_length >= 1, ErrorKind::config, "data: sequence_length is ", sequence_length,
              "; it takes 1 or more");
  const std::int64_t num_tokens = tokens_->num_tokens();
  MOESH_CHECK(num_tokens > 0, ErrorKind::data, tokens_->name(),
              " holds no text; name a file with text in data.path");
  MOESH_CHECK(num_tokens > sequence_length, ErrorKind::data, tokens_->name(), " has ", num_tokens,
              " ", tokens_->unit(), ", and a sequence of data.sequence_length = ", sequence_length,
              " needs ", sequence_length + 1, "; set data.sequence_length to ", num_tokens - 1,
              " or less, or use more text");
  epochs_.size = (num_tokens - 1) / sequence_length;
}

// The last document that starts at this token or before.
std::int64_t PackedDataset::document_at(std::int64_t token) const {
  std::int64_t low = 0, high = tokens_->num_documents();
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (tokens_->start(middle) <= token ? low : high) = middle;
  }
  return low;
}

Sample PackedDataset::get(std::int64_t index) const {
  MOESH_CHECK(index >= 0, "sample ", index, " of ", tokens_->name());
  const std::int64_t begin = epochs_.at(index) * sequence_length_, count = sequence_length_ + 1;
  Sample sample;
  append_tokens(*tokens_, begin, count, sample);
  std::int64_t document = document_at(begin);
  for (std::int64_t token = begin; token < begin + count; ++token) {
    // Several, where documents are empty.
    while (document + 1 < tokens_->num_documents() && tokens_->start(document + 1) <= token)
      ++document;
    sample.documents.push_back(document);
  }
  return sample;
}

std::string PackedDataset::describe() const {
  return detail::concat(tokens_->name(), ": ", tokens_->num_documents(),
                        tokens_->num_documents() == 1 ? " document, " : " documents, ",
                        tokens_->num_tokens(), " tokens, ", epochs_.size, " sequences of ",
                        sequence_length_);
}

}  // namespace moesh::data
