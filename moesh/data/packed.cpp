#include "moesh/data/packed.h"

#include <algorithm>
#include <bit>
#include <set>
#include <sstream>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json.h"

namespace moesh::data {

Shuffle::Shuffle(std::int64_t size, std::uint64_t seed, std::string_view stream)
    : size_(size), random_(seed, stream) {
  MOESH_CHECK(size >= 1, "a random order of ", size, " things");
  // Two halves of equal width: at most 4 * size values (64 where there are few: narrower halves mix
  // badly), so a few rounds are enough.
  half_bits_ =
      std::max(3, (static_cast<int>(std::bit_width(static_cast<std::uint64_t>(size - 1))) + 1) / 2);
}

std::uint64_t Shuffle::once(std::uint64_t value) const {
  constexpr std::uint64_t kRounds = 8;
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = value >> half_bits_, right = value & mask;
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    const std::uint64_t mixed = left ^ (random_.bits((round << 32) + right) & mask);
    left = right;
    right = mixed;
  }
  return (left << half_bits_) | right;
}

std::int64_t Shuffle::at(std::int64_t place) const {
  MOESH_CHECK(place >= 0 && place < size_, "place ", place, " in a random order of ", size_);
  auto value = once(static_cast<std::uint64_t>(place));
  while (value >= static_cast<std::uint64_t>(size_)) value = once(value);
  return static_cast<std::int64_t>(value);
}

std::int64_t Epochs::at(std::int64_t index) const {
  const std::int64_t epoch = index / size, place = index % size;
  return shuffle ? Shuffle(size, seed, detail::concat("data: epoch ", epoch)).at(place) : place;
}

namespace {

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
  Corpus corpus(path);
  corpus.add(formats::read_file(path, ErrorKind::data));
  return corpus;
}

Corpus read_jsonl_corpus(const std::string& path) {
  Corpus corpus(path);
  std::istringstream lines(formats::read_file(path, ErrorKind::data));
  formats::each_json_text(lines, path, "text", [&](const std::string& text) { corpus.add(text); });
  return corpus;
}

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
  return detail::concat(printable(tokens_->name()), ": ", tokens_->num_documents(),
                        tokens_->num_documents() == 1 ? " document, " : " documents, ",
                        tokens_->num_tokens(), " tokens, ", epochs_.size, " sequences of ",
                        sequence_length_);
}

std::vector<std::vector<Piece>> best_fit(std::vector<Piece> pieces, std::int64_t capacity) {
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.length > b.length; });
  std::vector<std::vector<Piece>> groups;
  std::set<std::pair<std::int64_t, std::size_t>> rooms;  // what is left, of which group
  for (const Piece& piece : pieces) {
    const auto found = rooms.lower_bound({piece.length, 0});
    const std::size_t group = found == rooms.end() ? groups.size() : found->second;
    const std::int64_t room = found == rooms.end() ? capacity : found->first;
    if (found == rooms.end())
      groups.emplace_back();
    else
      rooms.erase(found);
    groups[group].push_back(piece);
    rooms.insert({room - piece.length, group});
  }
  return groups;
}

BestFitDataset::BestFitDataset(std::shared_ptr<const TokenStore> tokens,
                               std::int64_t sequence_length, std::uint64_t seed, bool shuffle)
    : tokens_(std::move(tokens)),
      sequence_length_(sequence_length),
      sequences_before_{0},
      epochs_{.seed = seed, .shuffle = shuffle} {
  MOESH_CHECK(sequence_length >= 1, ErrorKind::config, "data: sequence_length is ", sequence_length,
              "; it takes 1 or more");
  for (std::int64_t w = 0; w * kWindow < tokens_->num_documents(); ++w) {
    const Window here = window(w);
    num_filled_ += here.full_before.back() * (sequence_length_ + 1);
    for (const auto& pieces : here.others)
      for (const Piece& p : pieces) num_filled_ += p.length;
    sequences_before_.push_back(sequences_before_.back() + here.num_sequences());
  }
  epochs_.size = sequences_before_.back();
  MOESH_CHECK(epochs_.size > 0, ErrorKind::data, tokens_->name(), " has ", tokens_->num_documents(),
              " documents and ", tokens_->num_tokens(), " ", tokens_->unit(),
              ", and nothing can be learned of a document with less than two; use more text");
}

BestFitDataset::Window BestFitDataset::window(std::int64_t number) const {
  const std::int64_t num_documents = tokens_->num_documents(), first = number * kWindow,
                     last = std::min(first + kWindow, num_documents);
  Window window{.full_before = {0}};
  std::vector<Piece> rests;
  for (std::int64_t d = first; d < last; ++d) {
    const std::int64_t start = tokens_->start(d),
                       end = d + 1 < num_documents ? tokens_->start(d + 1) : tokens_->num_tokens();
    const std::int64_t num_labels = std::max<std::int64_t>(0, end - start - 1);
    const std::int64_t num_full = num_labels / sequence_length_;
    window.starts.push_back(start);
    window.full_before.push_back(window.full_before.back() + num_full);
    if (const std::int64_t rest = num_labels % sequence_length_; rest > 0)
      rests.push_back({start + num_full * sequence_length_, rest + 1});
  }
  window.others = best_fit(std::move(rests), sequence_length_ + 1);
  return window;
}

std::vector<Piece> BestFitDataset::pieces_of(const Window& window, std::int64_t sequence) const {
  const auto& before = window.full_before;
  if (sequence >= before.back())
    return window.others[static_cast<std::size_t>(sequence - before.back())];
  const auto after = std::upper_bound(before.begin(), before.end(), sequence);
  const auto document = static_cast<std::size_t>(after - before.begin() - 1);
  return {{window.starts[document] + (sequence - before[document]) * sequence_length_,
           sequence_length_ + 1}};
}

Sample BestFitDataset::get(std::int64_t index) const {
  MOESH_CHECK(index >= 0, "sample ", index, " of ", tokens_->name());
  const std::int64_t sequence = epochs_.at(index);
  const auto after = std::upper_bound(sequences_before_.begin(), sequences_before_.end(), sequence);
  const std::int64_t number = after - sequences_before_.begin() - 1;
  const auto pieces = pieces_of(window(number), sequence - *std::prev(after));
  Sample sample;
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    append_tokens(*tokens_, pieces[p].begin, pieces[p].length, sample);
    sample.documents.resize(sample.tokens.size(), static_cast<std::int64_t>(p));
  }
  const auto count = static_cast<std::size_t>(sequence_length_ + 1);
  sample.tokens.resize(count, 0);
  sample.documents.resize(count, kPadding);
  if (tokens_->has_mask()) sample.trained.resize(count, 0);
  return sample;
}

std::string BestFitDataset::describe() const {
  const std::int64_t room = epochs_.size * (sequence_length_ + 1);
  return detail::concat(printable(tokens_->name()), ": ", tokens_->num_documents(), " documents, ",
                        tokens_->num_tokens(), " tokens, ", epochs_.size, " sequences of ",
                        sequence_length_, " by best fit, ", 100 * num_filled_ / room, " % filled");
}

}  // namespace moesh::data
