#include "moesh/data/dataset.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "moesh/base/text.h"

namespace moesh::data {

Sample OneEpoch::get(std::int64_t index) const {
  if (index < *of_.size()) return of_.get(index);
  const auto count = static_cast<std::size_t>(of_.sequence_length() + 1);
  return {.tokens = std::vector<TokenId>(count, 0),
          .documents = std::vector<std::int64_t>(count, kPadding)};
}

namespace {

// Tokens ahead of position t of one sample; k = 0 is the next token.
struct AheadOf {
  const Sample& sample;
  std::vector<std::size_t> last;  // of each token: the last one of its document

  explicit AheadOf(const Sample& s) : sample(s), last(s.documents.size()) {
    for (std::size_t t = last.size(); t-- > 0;) {
      const bool ends = t + 1 == last.size() || s.documents[t] != s.documents[t + 1];
      last[t] = ends ? t : last[t + 1];
    }
  }
  std::int64_t input(std::size_t t, std::size_t k) const {
    return t + k < last.size() ? sample.tokens[t + k] : 0;  // one that no label is predicted from
  }
  // The prediction stays in the document of its position.
  std::int64_t label(std::size_t t, std::size_t k) const {
    const std::size_t target = t + k + 1;
    if (target > last[t] || sample.documents[t] == kPadding) return kIgnoredLabel;
    return sample.trained.empty() || sample.trained[target] ? sample.tokens[target] : kIgnoredLabel;
  }
};

}  // namespace

Batch make_batch(const Dataset& dataset, std::int64_t first, std::int64_t count,
                 std::int64_t num_ahead) {
  MOESH_CHECK(first >= 0 && count >= 0 && first <= std::numeric_limits<std::int64_t>::max() - count,
              ErrorKind::config, "samples ", first, " and the ", count,
              " that follow do not exist; both numbers are 0 or more");
  const std::int64_t length = dataset.sequence_length();
  const auto make = [&] { return at::empty({count, length}, at::kLong); };
  Batch batch{
      .input_ids_BL = make(), .labels_BL = make(), .document_starts_BL = make(), .ahead = {}};
  for (std::int64_t k = 0; k < num_ahead; ++k) batch.ahead.push_back({make(), make()});
  const auto numbers = [](at::Tensor& t) { return t.mutable_data_ptr<std::int64_t>(); };
  std::vector<std::pair<std::int64_t*, std::int64_t*>> ids{
      {numbers(batch.input_ids_BL), numbers(batch.labels_BL)}};  // inputs and labels, by depth
  for (auto& a : batch.ahead) ids.emplace_back(numbers(a.input_ids_BL), numbers(a.labels_BL));
  auto* begin = numbers(batch.document_starts_BL);
  for (std::int64_t b = 0; b < count; ++b) {
    const Sample sample = dataset.get(first + b);
    const auto expected = static_cast<std::size_t>(length + 1);
    MOESH_CHECK(sample.tokens.size() == expected && sample.documents.size() == expected, "sample ",
                first + b, " has ", sample.tokens.size(), " tokens and ", sample.documents.size(),
                " document numbers, not ", expected);
    MOESH_CHECK(sample.trained.empty() || sample.trained.size() == expected, "sample ", first + b,
                " has a loss mask of ", sample.trained.size(), " tokens, not ", expected);
    const auto& documents = sample.documents;
    const AheadOf ahead(sample);
    std::size_t start = 0;
    for (std::size_t t = 0; t + 1 < expected; ++t) {
      if (t == 0 || documents[t] != documents[t - 1]) start = t, ++batch.num_documents;
      *begin++ = static_cast<std::int64_t>(start);
      for (std::size_t k = 0; k < ids.size(); ++k)
        *ids[k].first++ = ahead.input(t, k), *ids[k].second++ = ahead.label(t, k);
    }
  }
  return batch;
}

namespace {

// Whole numbers that add up to `total`, in proportion to the weights: each rounded down, and one
// more for those that lost most by it. Nobody gets nothing.
std::vector<std::int64_t> apportioned(const std::vector<double>& weights, std::int64_t total) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<std::int64_t> counts;
  std::vector<std::pair<double, std::size_t>> lost;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const double exact = weights[i] / sum * static_cast<double>(total);
    counts.push_back(std::max<std::int64_t>(1, static_cast<std::int64_t>(std::floor(exact))));
    lost.emplace_back(static_cast<double>(counts.back()) - exact, i);
  }
  std::sort(lost.begin(), lost.end());
  std::int64_t left = total - std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  for (std::size_t i = 0; left > 0; ++i, --left) ++counts[lost[i % lost.size()].second];
  for (; left < 0; ++left) --*std::max_element(counts.begin(), counts.end());  // of the raised ones
  return counts;
}

}  // namespace

Mixture::Mixture(std::vector<MixturePart> parts) : parts_(std::move(parts)) {
  MOESH_CHECK(!parts_.empty() && std::ssize(parts_) <= kPeriod, ErrorKind::config,
              "data: a mixture of ", parts_.size(), " sources; it takes 1 to ", kPeriod);
  std::vector<double> weights;
  for (const MixturePart& p : parts_) {
    MOESH_CHECK(std::isfinite(p.weight) && p.weight > 0, ErrorKind::config, "data: source '",
                p.name, "' has weight ", p.weight, "; it takes a number above 0");
    MOESH_CHECK(p.dataset->sequence_length() == sequence_length(), "source '", p.name,
                "' has sequences of another length");
    weights.push_back(p.weight);
  }
  per_period_ = apportioned(weights, kPeriod);
  // The next sample is of the part that is furthest behind its share.
  std::vector<std::int64_t> taken(parts_.size(), 0);
  for (std::int64_t n = 1; n <= kPeriod; ++n) {
    std::size_t next = 0;
    std::int64_t most = 0;
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      const std::int64_t behind = n * per_period_[p] - taken[p] * kPeriod;
      if (behind > most) most = behind, next = p;
    }
    period_.push_back({next, taken[next]++});
  }
}

Mixture::SourceIndex Mixture::place(std::int64_t index) const {
  MOESH_CHECK(index >= 0, "sample ", index, " of a mixture");
  const auto [part, before] = period_[static_cast<std::size_t>(index % kPeriod)];
  return {part, index / kPeriod * per_period_[part] + before};
}

Sample Mixture::get(std::int64_t index) const {
  const SourceIndex at = place(index);
  return parts_[at.part].dataset->get(at.index);
}

std::int64_t Mixture::vocab_size() const {
  std::int64_t most = 0;
  for (const MixturePart& p : parts_) most = std::max(most, p.dataset->vocab_size());
  return most;
}

std::string Mixture::describe() const {
  std::string text = counted(std::ssize(parts_), "source");
  for (std::size_t p = 0; p < parts_.size(); ++p)
    text += detail::concat("\n  ", printable(parts_[p].name), " (",
                           100.0 * static_cast<double>(per_period_[p]) / kPeriod,
                           " %): ", parts_[p].dataset->describe());
  return text;
}

namespace {

// Random numbers are found by (row, column) in one stream.
std::uint64_t cell(std::int64_t row, std::int64_t column) {
  return (static_cast<std::uint64_t>(row) << 32) + static_cast<std::uint64_t>(column);
}

}  // namespace

void SyntheticOptions::validate() const {
  MOESH_CHECK(vocab_size >= 2, ErrorKind::config, "synthetic language: vocab_size is ", vocab_size,
              "; it takes 2 tokens or more");
  MOESH_CHECK(std::in_range<TokenId>(vocab_size - 1), ErrorKind::config,
              "synthetic language: vocab_size is ", vocab_size, "; ids of 32 bits hold ",
              std::int64_t{std::numeric_limits<TokenId>::max()} + 1);
  MOESH_CHECK(sequence_length >= 1, ErrorKind::config, "synthetic language: sequence_length is ",
              sequence_length, "; it takes 1 or more");
  MOESH_CHECK(successors >= 1 && successors <= std::min<std::int64_t>(vocab_size, 64),
              ErrorKind::config, "synthetic language: a token has ", successors,
              " successors; with ", vocab_size, " tokens it takes 1 to ",
              std::min<std::int64_t>(vocab_size, 64));
}

SyntheticLanguage::SyntheticLanguage(const SyntheticOptions& options) : options_(options) {
  options_.validate();
  double total = 0;
  for (std::int64_t j = 0; j < options_.successors; ++j)
    total += std::exp2(-static_cast<double>(j));
  for (std::int64_t j = 0; j < options_.successors; ++j)
    probabilities_.push_back(std::exp2(-static_cast<double>(j)) / total);

  const Random random(options_.seed, "synthetic language: successors");
  successors_.reserve(static_cast<std::size_t>(options_.vocab_size * options_.successors));
  for (std::int64_t token = 0; token < options_.vocab_size; ++token) {
    const auto begin = static_cast<std::ptrdiff_t>(successors_.size());
    for (std::int64_t draw = 0; std::ssize(successors_) - begin < options_.successors; ++draw) {
      const auto next = static_cast<TokenId>(
          random.below(cell(token, draw), static_cast<std::uint64_t>(options_.vocab_size)));
      if (std::find(successors_.begin() + begin, successors_.end(), next) == successors_.end())
        successors_.push_back(next);
    }
  }
}

Sample SyntheticLanguage::get(std::int64_t index) const {
  MOESH_CHECK(index >= 0, "sample ", index, " of a synthetic language");
  const Random random(options_.seed, "synthetic language: samples");
  const auto length = static_cast<std::size_t>(options_.sequence_length + 1);
  Sample sample{.tokens = std::vector<TokenId>(length),
                .documents = std::vector<std::int64_t>(length, index)};
  auto token = static_cast<TokenId>(
      random.below(cell(index, 0), static_cast<std::uint64_t>(options_.vocab_size)));
  sample.tokens[0] = token;
  for (std::size_t t = 1; t < length; ++t) {
    double left = random.uniform(cell(index, static_cast<std::int64_t>(t)));
    std::int64_t j = 0;
    while (j + 1 < options_.successors && left >= probabilities_[static_cast<std::size_t>(j)])
      left -= probabilities_[static_cast<std::size_t>(j++)];
    token = successors_[static_cast<std::size_t>(token * options_.successors + j)];
    sample.tokens[t] = token;
  }
  return sample;
}

std::optional<double> SyntheticLanguage::entropy() const {
  double nats = 0;
  for (double p : probabilities_) nats -= p * std::log(p);
  return nats;
}

std::string SyntheticLanguage::describe() const {
  return detail::concat("synthetic language of ", options_.vocab_size, " tokens, entropy ",
                        *entropy(), " nats per token");
}

double SyntheticLanguage::probability(std::int64_t token, std::int64_t next) const {
  MOESH_CHECK(token >= 0 && token < options_.vocab_size, "token ", token, " of ",
              options_.vocab_size);
  for (std::int64_t j = 0; j < options_.successors; ++j)
    if (successors_[static_cast<std::size_t>(token * options_.successors + j)] == next)
      return probabilities_[static_cast<std::size_t>(j)];
  return 0;
}

}  // namespace moesh::data
