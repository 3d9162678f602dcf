#pragma once
// Sequences of tokens by global sample index, and batches of them. A sample depends on its index
// only, so the global batch is the same on every mesh. B sequences, L tokens each

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moesh/base/label.h"

namespace moesh::data {

/// A token in memory and in files: the largest vocabularies (201,088 words) do not fit into 16
/// bits. A batch has int64, which is what an embedding takes.
using TokenId = std::int32_t;

/// In Sample::documents: padding, which has no label.
constexpr std::int64_t kPadding = -1;

/// sequence_length + 1 tokens: input and label of every position. Tokens side by side with the same
/// number in `documents` belong together.
struct Sample {
  std::vector<TokenId> tokens;
  std::vector<std::int64_t> documents;
  /// The loss mask: 1 for a token that the model is to predict, 0 for one that it only reads (the
  /// question of a chat). Empty: it is to predict every token.
  std::vector<std::uint8_t> trained = {};
};

/// Any index >= 0 is a sample: a finite set begins again. Reading changes nothing, so ranks in
/// threads may read from one.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual Sample get(std::int64_t index) const = 0;
  virtual std::int64_t sequence_length() const = 0;
  /// Tokens are in [0, vocab_size()).
  virtual std::int64_t vocab_size() const = 0;
  /// It begins again after this many samples; nothing: never.
  virtual std::optional<std::int64_t> size() const { return std::nullopt; }
  /// The lowest loss that a model can reach, in nats per label, where it is known.
  virtual std::optional<double> entropy() const { return std::nullopt; }
  /// For a log line: what it is and how much there is of it.
  virtual std::string describe() const = 0;
};

/// On the host, int64. Labels are the next tokens: they are shifted here, before any cut over cp
/// and tp.
struct Batch {
  at::Tensor input_ids_BL;
  /// kIgnoredLabel where the next token is of another document, or is only read.
  at::Tensor labels_BL;
  at::Tensor document_starts_BL;  // the position in the sequence where each token's document begins
  std::int64_t num_documents = 0;  // of all sequences
  /// For multi-token prediction, at depth k = 1, 2, ..: of position i the token i + k and, as
  /// label, token i + k + 1. Ignored labels are as above, and those of tokens which the sample does
  /// not have.
  struct TokensAhead {
    at::Tensor input_ids_BL, labels_BL;
  };
  std::vector<TokensAhead> ahead;
};

/// The samples of another dataset, each once: those that follow are padding.
class OneEpoch : public Dataset {
 public:
  /// `of` has a size, and outlives it.
  explicit OneEpoch(const Dataset& of) : of_(of) {}
  Sample get(std::int64_t index) const override;
  std::int64_t sequence_length() const override { return of_.sequence_length(); }
  std::int64_t vocab_size() const override { return of_.vocab_size(); }
  std::string describe() const override { return of_.describe(); }
  std::optional<std::int64_t> size() const override { return of_.size(); }

 private:
  const Dataset& of_;
};

/// Samples first, first + 1, ... of the global order, with tokens ahead for `num_ahead` depths.
Batch make_batch(const Dataset& dataset, std::int64_t first, std::int64_t count,
                 std::int64_t num_ahead = 0);

/// How the samples of one step are dealt out. Micro-batches and dp ranks take ranges of one global
/// order, so a step of n sequences has the same ones however they are split.
struct SampleOrder {
  std::int64_t batch = 1;  // sequences of a dp rank in a micro-batch
  std::int64_t num_dp = 1, num_micro = 1;

  std::int64_t num_per_step() const { return num_micro * num_dp * batch; }
  /// The samples of one dp rank's micro-batch are first(...) to first(...) + batch - 1.
  std::int64_t first(std::int64_t step, std::int64_t micro, std::int64_t dp_rank) const {
    return step * num_per_step() + (micro * num_dp + dp_rank) * batch;
  }
};

// Several datasets in one order, each with its share.

struct MixturePart {
  std::string name;
  double weight;  // relative to those of the others
  std::unique_ptr<Dataset> dataset;
};

/// Each part has its share of any first n samples, to within two; shares are multiples of 1 /
/// kPeriod. Which part sample i is of, and which sample of that, depends only on i and the
/// weights: ranks and runs that begin anywhere agree, without a list of what was taken.
class Mixture : public Dataset {
 public:
  static constexpr std::int64_t kPeriod = 10000;

  explicit Mixture(std::vector<MixturePart> parts);

  Sample get(std::int64_t index) const override;
  std::int64_t sequence_length() const override { return parts_[0].dataset->sequence_length(); }
  std::int64_t vocab_size() const override;
  std::string describe() const override;

  /// A part, and the number of a sample in it.
  struct SourceIndex {
    std::size_t part;
    std::int64_t index;
  };
  SourceIndex place(std::int64_t index) const;

 private:
  std::vector<MixturePart> parts_;
  // The part of each sample of a period, and how many of that come before.
  std::vector<SourceIndex> period_;
  std::vector<std::int64_t> per_period_;  // of each part
};

// A language with a known entropy: a random Markov chain. A demo needs no download, and the lowest
// possible loss is known.

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
