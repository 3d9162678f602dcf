// The synthetic language, the random order, and how samples are dealt out.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "moesh/data/dataset.h"
#include "moesh/data/packed.h"
#include "tests/support.h"

namespace moesh::data {
namespace {

TEST(SyntheticLanguage, EntropyIsThatOfWhatItSays) {
  constexpr std::int64_t kLength = 2000, kSamples = 100;
  for (std::int64_t successors : {1, 2, 4, 7}) {
    const SyntheticLanguage language(
        {.vocab_size = 11, .sequence_length = kLength, .successors = successors, .seed = 5});
    double surprise = 0, squares = 0;
    std::map<std::pair<TokenId, TokenId>, double> pairs;
    std::map<TokenId, double> singles;
    for (std::int64_t i = 0; i < kSamples; ++i) {
      const auto tokens = language.get(i).tokens;
      for (std::size_t t = 1; t < tokens.size(); ++t) {
        const double p = language.probability(tokens[t - 1], tokens[t]);
        ASSERT_GT(p, 0) << tokens[t - 1] << " -> " << tokens[t];
        surprise -= std::log(p), squares += std::log(p) * std::log(p);
        ++pairs[{tokens[t - 1], tokens[t]}], ++singles[tokens[t - 1]];
      }
    }
    const double n = kSamples * kLength, mean = surprise / n,
                 deviation = std::sqrt(std::max(0.0, squares / n - mean * mean) / n);
    const double entropy = language.entropy().value();
    EXPECT_NEAR(mean, entropy, 5 * deviation + 1e-12) << successors;
    // The same only from counts, as a model that knows nothing of the language would see it.
    // Counting is biased downwards by about (pairs - tokens) / 2n.
    double counted = 0;
    for (const auto& [pair, count] : pairs)
      counted -= count / n * std::log(count / singles[pair.first]);
    EXPECT_NEAR(counted, entropy, 5 * deviation + static_cast<double>(pairs.size()) / n)
        << successors;
    EXPECT_EQ(pairs.size(), static_cast<std::size_t>(successors) * singles.size());
  }
  const SyntheticLanguage two({.vocab_size = 5, .successors = 2});
  EXPECT_NEAR(*two.entropy(), std::log(3) - 2.0 / 3 * std::log(2), 1e-15);  // 2/3 and 1/3
}

TEST(SyntheticLanguage, ProbabilitiesAfterEveryTokenAddUpToOne) {
  const SyntheticLanguage language({.vocab_size = 50, .successors = 6, .seed = 1});
  for (std::int64_t token = 0; token < 50; ++token) {
    double sum = 0;
    for (std::int64_t next = 0; next < 50; ++next) sum += language.probability(token, next);
    EXPECT_NEAR(sum, 1, 1e-12);
  }
}

TEST(SyntheticLanguage, DependsOnSeedAndIndexAlone) {
  const SyntheticOptions options{.vocab_size = 96, .sequence_length = 40, .seed = 3};
  const SyntheticLanguage a(options), b(options);
  SyntheticOptions changed = options;
  changed.seed = 4;
  const SyntheticLanguage other(changed);
  changed = options;
  changed.sequence_length = 10;
  const SyntheticLanguage shorter(changed);
  for (std::int64_t index : {0, 1, 77, 1 << 30}) {
    const auto tokens = a.get(index).tokens;
    ASSERT_EQ(tokens.size(), 41u);
    EXPECT_EQ(tokens, b.get(index).tokens);
    EXPECT_NE(tokens, other.get(index).tokens);
    EXPECT_NE(tokens, a.get(index + 1).tokens);
    EXPECT_EQ(std::vector(tokens.begin(), tokens.begin() + 11),
              shorter.get(index).tokens);  // the same text, read less far
    for (std::int64_t token : tokens) EXPECT_TRUE(token >= 0 && token < 96);
  }
}

// Ids of the largest vocabulary of the five models, and the same order as ever.
TEST(SyntheticLanguage, HasIdsThatNeedMoreThan16Bits) {
  const SyntheticLanguage language(
      {.vocab_size = 201'088, .sequence_length = 2000, .successors = 2, .seed = 1});
  const auto tokens = language.get(0).tokens;
  EXPECT_GT(*std::max_element(tokens.begin(), tokens.end()), 1 << 16);
  for (std::size_t t = 1; t < tokens.size(); ++t)
    ASSERT_GT(language.probability(tokens[t - 1], tokens[t]), 0);
}

TEST(SyntheticLanguage, RefusesWhatCannotBe) {
  const auto error = [](const SyntheticOptions& o) {
    return error_of([&] { SyntheticLanguage{o}; }, ErrorKind::config);
  };
  expect_parts(error({.vocab_size = 1}), {"vocab_size is 1"});
  expect_parts(error({.vocab_size = (std::int64_t{1} << 31) + 1}),
               {"vocab_size is 2147483649", "2147483648"});
  expect_parts(error({.vocab_size = 3, .successors = 4}), {"4 successors", "1 to 3"});
  expect_parts(error({.vocab_size = 3, .successors = 0}), {"0 successors", "1 to 3"});
  expect_parts(error({.vocab_size = 8, .sequence_length = 0}), {"sequence_length is 0"});
}

// A run that is resumed by another build sees the samples that it would have seen: the values are
// those of a program in another language, written from what the headers say.
TEST(SyntheticLanguage, StaysTheSame) {
  using Ids = std::vector<TokenId>;
  const auto sample = [](std::int64_t successors, std::int64_t index) {
    return SyntheticLanguage(
               {.vocab_size = 11, .sequence_length = 12, .successors = successors, .seed = 5})
        .get(index)
        .tokens;
  };
  EXPECT_EQ(sample(4, 3), (Ids{7, 0, 10, 10, 10, 10, 2, 6, 6, 9, 5, 1, 9}));
  EXPECT_EQ(sample(11, 0), (Ids{8, 4, 7, 4, 7, 0, 7, 0, 0, 0, 10, 2, 1}));
}

TEST(Shuffle, StaysTheSame) {
  const auto first = [](std::int64_t size) {
    const Shuffle shuffle(size, 7, "order");
    std::vector<std::int64_t> places;
    for (std::int64_t i = 0; i < 5; ++i) places.push_back(shuffle.at(i));
    return places;
  };
  using Places = std::vector<std::int64_t>;
  EXPECT_EQ(first(5), (Places{2, 4, 1, 0, 3}));
  EXPECT_EQ(first(64), (Places{49, 45, 24, 0, 47}));
  EXPECT_EQ(first(65), (Places{48, 2, 18, 23, 24}));
  EXPECT_EQ(first(1'000'000'007), (Places{11940659, 830435022, 410861900, 433811122, 613776386}));
  const Epochs epochs{.size = 9, .seed = 3, .shuffle = true};
  EXPECT_EQ(epochs.at(2), 7);
  EXPECT_EQ(epochs.at(9 + 2), 6);
  EXPECT_EQ((Epochs{.size = 9, .seed = 3, .shuffle = false}.at(9 + 2)), 2);
}

TEST(Shuffle, IsAPermutationOfEverySize) {
  for (std::int64_t size = 1; size <= 130; ++size) {
    const Shuffle shuffle(size, 9, "epoch 0");
    std::set<std::int64_t> seen;
    for (std::int64_t i = 0; i < size; ++i) {
      seen.insert(shuffle.at(i));
      EXPECT_TRUE(shuffle.at(i) >= 0 && shuffle.at(i) < size);
    }
    EXPECT_EQ(std::ssize(seen), size);
  }
}

TEST(Shuffle, EverythingGoesEverywhere) {
  constexpr std::int64_t kSize = 5, kOrders = 20'000;
  std::vector<double> counts(kSize * kSize);
  for (std::int64_t order = 0; order < kOrders; ++order) {
    const Shuffle shuffle(kSize, 1, "order " + std::to_string(order));
    for (std::int64_t i = 0; i < kSize; ++i)
      ++counts[static_cast<std::size_t>(i * kSize + shuffle.at(i))];
  }
  for (double count : counts)
    EXPECT_NEAR(count, kOrders / kSize, 5 * std::sqrt(kOrders * 0.2 * 0.8));
  EXPECT_EQ(Shuffle(1000, 1, "a").at(17), Shuffle(1000, 1, "a").at(17));
}

// Documents of 3, 1, 5 and 4 tokens, then padding; every fourth token is only read.
class SeveralDocuments : public Dataset {
 public:
  Sample get(std::int64_t index) const override {
    Sample s;
    for (std::int64_t t = 0; t < 16; ++t) {
      s.tokens.push_back(static_cast<TokenId>(100 * index + t));
      s.documents.push_back(t < 3 ? 0 : t < 4 ? 1 : t < 9 ? 2 : t < 13 ? 3 : kPadding);
      s.trained.push_back(t % 4 != 0);
    }
    return s;
  }
  std::int64_t sequence_length() const override { return 15; }
  std::int64_t vocab_size() const override { return 1000; }
  std::string describe() const override { return "several documents"; }
};

TEST(Batch, TokensAheadStayInTheirDocument) {
  const SeveralDocuments data;
  constexpr std::int64_t kDepths = 6;
  const Batch batch = make_batch(data, 3, 2, kDepths);
  ASSERT_EQ(batch.ahead.size(), std::size_t{kDepths});
  for (std::int64_t b = 0; b < 2; ++b) {
    const Sample s = data.get(3 + b);
    for (std::int64_t k = 1; k <= kDepths; ++k) {
      const auto& ahead = batch.ahead[static_cast<std::size_t>(k - 1)];
      for (std::int64_t t = 0; t < 15; ++t) {
        const auto at = [](const auto& list, std::int64_t i) {
          return static_cast<std::int64_t>(list[static_cast<std::size_t>(i)]);
        };
        const std::int64_t target = t + k + 1;
        bool counts = target < 16 && at(s.documents, t) != kPadding && at(s.trained, target) != 0;
        for (std::int64_t i = t; counts && i < target; ++i)
          counts = at(s.documents, i) == at(s.documents, i + 1);
        EXPECT_EQ(ahead.labels_BL[b][t].item<std::int64_t>(),
                  counts ? at(s.tokens, target) : kIgnoredLabel)
            << "depth " << k << ", position " << t;
        EXPECT_EQ(ahead.input_ids_BL[b][t].item<std::int64_t>(),
                  t + k < 16 ? at(s.tokens, t + k) : 0);
      }
    }
  }
}

TEST(Batch, LabelsAreTheNextTokens) {
  const SyntheticLanguage language({.vocab_size = 96, .sequence_length = 7, .seed = 2});
  const Batch batch = make_batch(language, 10, 3);
  ASSERT_EQ(batch.input_ids_BL.sizes(), (std::vector<std::int64_t>{3, 7}));
  ASSERT_EQ(batch.labels_BL.sizes(), (std::vector<std::int64_t>{3, 7}));
  EXPECT_EQ(batch.labels_BL.scalar_type(), at::kLong);
  for (std::int64_t b = 0; b < 3; ++b) {
    const auto tokens = language.get(10 + b).tokens;
    for (std::int64_t t = 0; t < 7; ++t) {
      EXPECT_EQ(batch.input_ids_BL[b][t].item<std::int64_t>(), tokens[static_cast<std::size_t>(t)]);
      EXPECT_EQ(batch.labels_BL[b][t].item<std::int64_t>(),
                tokens[static_cast<std::size_t>(t + 1)]);
    }
  }
  EXPECT_EQ(make_batch(language, 0, 0).input_ids_BL.sizes(), (std::vector<std::int64_t>{0, 7}));
  expect_parts(error_of([&] { make_batch(language, -1, 2); }, ErrorKind::config), {"samples -1"});
}

// Every way to split 24 sequences a step over ranks and micro-batches gives the same sequences in
// the same order.
TEST(SampleOrder, TheGlobalBatchIsTheSameOnEveryMesh) {
  const SyntheticLanguage language({.vocab_size = 96, .sequence_length = 5, .seed = 8});
  constexpr std::int64_t kPerStep = 24, kSteps = 3;
  int num_splits = 0;
  for (std::int64_t batch = 1; batch <= kPerStep; ++batch)
    for (std::int64_t dp = 1; dp <= kPerStep; ++dp) {
      if (kPerStep % (batch * dp) != 0) continue;
      const SampleOrder order{.batch = batch, .num_dp = dp, .num_micro = kPerStep / batch / dp};
      ASSERT_EQ(order.num_per_step(), kPerStep);
      for (std::int64_t step = 0; step < kSteps; ++step) {
        std::vector<at::Tensor> parts;
        for (std::int64_t micro = 0; micro < order.num_micro; ++micro)
          for (std::int64_t rank = 0; rank < dp; ++rank)
            parts.push_back(make_batch(language, order.first(step, micro, rank), batch).labels_BL);
        EXPECT_TRUE(
            at::equal(at::cat(parts), make_batch(language, step * kPerStep, kPerStep).labels_BL));
      }
      ++num_splits;
    }
  EXPECT_EQ(num_splits, 30);  // ordered triples with the product 24
}

}  // namespace
}  // namespace moesh::data
