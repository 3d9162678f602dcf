#pragma once
// Several datasets in one order, each with its share.

#include <memory>

#include "moesh/data/dataset.h"

namespace moesh::data {

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

}  // namespace moesh::data
