#pragma once
// A language with a known entropy: a random Markov chain. A demo needs no download, and the lowest
// possible loss is known.

#include "moesh/data/dataset.h"

namespace moesh::data {

struct SyntheticOptions {
  std::int64_t vocab_size = 0;
  std::int64_t sequence_length = 64;
  std::int64_t successors = 4;
  std::uint64_t seed = 0;

  void validate() const;
};

/// Each token has its own few successors, drawn at random; the j-th follows with a probability
/// proportional to 2^-j. Each sample is one document and begins anywhere.
class SyntheticLanguage : public Dataset {
 public:
  explicit SyntheticLanguage(const SyntheticOptions& options);

  Sample get(std::int64_t index) const override;
  std::int64_t sequence_length() const override { return options_.sequence_length; }
  std::int64_t vocab_size() const override { return options_.vocab_size; }
  /// Exact, and the same after every token: tokens differ only in their successors, not in the
  /// probabilities.
  std::optional<double> entropy() const override;
  std::string describe() const override;

  /// The chance that `next` follows `token`.
  double probability(std::int64_t token, std::int64_t next) const;

 private:
  SyntheticOptions options_;
  std::vector<double> probabilities_;  // of the j-th successor
  std::vector<TokenId> successors_;    // [vocab_size, successors]
};

}  // namespace moesh::data
