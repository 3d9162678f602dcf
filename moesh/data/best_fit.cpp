#include "moesh/data/best_fit.h"

#include <algorithm>
#include <set>
#include <utility>

#include "moesh/base/error.h"

namespace moesh::data {

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
  return detail::concat(tokens_->name(), ": ", tokens_->num_documents(), " documents, ",
                        tokens_->num_tokens(), " tokens, ", epochs_.size, " sequences of ",
                        sequence_length_, " by best fit, ", 100 * num_filled_ / room, " % filled");
}

}  // namespace moesh::data
