#include "moesh/data/dataset.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support.h"

namespace moesh::data {
namespace {

// Sample i of source s is s, i.
class Numbered : public Dataset {
 public:
  explicit Numbered(TokenId source) : source_(source) {}
  Sample get(std::int64_t index) const override {
    return {.tokens = {source_, static_cast<TokenId>(index)}, .documents = {0, 0}};
  }
  std::int64_t sequence_length() const override { return 1; }
  std::int64_t vocab_size() const override { return source_ + 10; }
  std::string describe() const override { return "numbered"; }

 private:
  TokenId source_;
};

Mixture mixture(const std::vector<double>& weights) {
  std::vector<MixturePart> parts;
  for (std::size_t i = 0; i < weights.size(); ++i)
    parts.push_back(
        {"s" + std::to_string(i), weights[i], std::make_unique<Numbered>(static_cast<TokenId>(i))});
  return Mixture(std::move(parts));
}

// Every source in its own order, none left out or twice, and at any moment its share.
TEST(Mixture, EachSourceHasItsShareOfAnyPrefix) {
  for (const auto& weights : std::vector<std::vector<double>>{
           {1}, {1, 1}, {3, 1}, {0.7, 0.2, 0.1}, {5, 1e-9}, {1, 2, 3, 4, 5, 6, 7}}) {
    const Mixture m = mixture(weights);
    double sum = 0;
    for (const double w : weights) sum += w;
    std::vector<std::int64_t> taken(weights.size(), 0);
    for (std::int64_t i = 0; i < 2 * Mixture::kPeriod + 77; ++i) {
      const Sample sample = m.get(i);
      const auto source = static_cast<std::size_t>(sample.tokens[0]);
      ASSERT_EQ(sample.tokens[1], taken[source]) << i;
      ++taken[source];
      for (std::size_t s = 0; s < weights.size(); ++s) {
        const double share = weights[s] / sum * static_cast<double>(i + 1),
                     rounding = static_cast<double>(i + 1) / Mixture::kPeriod;
        ASSERT_LE(std::abs(static_cast<double>(taken[s]) - share), 2 + rounding) << i;
      }
    }
  }
}

std::vector<std::int64_t> taken_in_a_period(const Mixture& m, std::size_t num_sources) {
  std::vector<std::int64_t> taken(num_sources, 0);
  for (std::int64_t i = 0; i < Mixture::kPeriod; ++i)
    ++taken[static_cast<std::size_t>(m.get(i).tokens[0])];
  return taken;
}

// Of 10,000: those that lose most by rounding down have one more, and nobody has none.
TEST(Mixture, RoundsSharesToThoseThatLoseMost) {
  using Counts = std::vector<std::int64_t>;
  EXPECT_EQ(taken_in_a_period(mixture({1.2, 2.9, 9995.9}), 3), (Counts{1, 3, 9996}));
  EXPECT_EQ(taken_in_a_period(mixture({3, 1}), 2), (Counts{7500, 2500}));
  EXPECT_EQ(taken_in_a_period(mixture({5, 1e-9}), 2), (Counts{9999, 1}));
}

// A run that is resumed by another build sees what it would have seen.
TEST(Mixture, TakesTheSourceThatIsFurthestBehind) {
  const Mixture m = mixture({3, 1});
  std::vector<TokenId> sources;
  for (std::int64_t i = 0; i < 8; ++i) sources.push_back(m.get(i).tokens[0]);
  EXPECT_EQ(sources, (std::vector<TokenId>{0, 0, 1, 0, 0, 0, 1, 0}));
}

TEST(Mixture, NamesASourceWithoutAWeight) {
  expect_parts(error_of([] { mixture({1, 0}); }, ErrorKind::config), {"source 's1' has weight 0"});
  EXPECT_EQ(mixture({1, 1, 1}).vocab_size(), 12);
  EXPECT_EQ(mixture({3, 1}).describe(), "2 sources\n  s0 (75 %): numbered\n  s1 (25 %): numbered");
}

}  // namespace
}  // namespace moesh::data
