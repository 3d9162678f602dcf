#include "moesh/data/mixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "moesh/base/error.h"
#include "moesh/base/text.h"

namespace moesh::data {
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
    text += detail::concat("\n  ", parts_[p].name, " (",
                           100.0 * static_cast<double>(per_period_[p]) / kPeriod,
                           " %): ", parts_[p].dataset->describe());
  return text;
}

}  // namespace moesh::data
