#include "moesh/data/synthetic.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/random.h"

namespace moesh::data {
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
