#include "moesh/data/packed.h"

#include <algorithm>
#include <map>

#include "moesh/base/random.h"
#include "tests/support.h"

namespace moesh::data {
namespace {

using Lengths = std::vector<std::vector<std::int64_t>>;

Lengths packed(const std::vector<std::int64_t>& lengths, std::int64_t capacity) {
  std::vector<Piece> pieces;
  for (const std::int64_t n : lengths) pieces.push_back({0, n});
  Lengths groups;
  for (const auto& group : best_fit(pieces, capacity)) {
    groups.emplace_back();
    for (const Piece& p : group) groups.back().push_back(p.length);
  }
  return groups;
}

TEST(BestFit, PutsEachPieceWhereItLeavesLeastRoom) {
  EXPECT_EQ(packed({2, 5, 3, 2, 4}, 8), (Lengths{{5, 3}, {4, 2, 2}}));
  EXPECT_EQ(packed({3, 6, 5, 2}, 8), (Lengths{{6, 2}, {5, 3}}));  // the first fit would be {6, 2}
  EXPECT_EQ(packed({8, 8}, 8), (Lengths{{8}, {8}}));
  EXPECT_EQ(packed({}, 8), Lengths{});
}

// Documents whose tokens say which they are: document * 1000 + place in it.
Corpus corpus_of(const std::vector<std::int64_t>& lengths) {
  Corpus corpus("corpus", 1 << 30);
  for (std::size_t d = 0; d < lengths.size(); ++d) {
    corpus.starts.push_back(std::ssize(corpus.tokens));
    for (std::int64_t i = 0; i < lengths[d]; ++i)
      corpus.tokens.push_back(static_cast<TokenId>(1000 * d + static_cast<std::size_t>(i)));
  }
  return corpus;
}

// More documents than are packed together, some of them empty, of one token, and longer than a
// sequence.
TEST(BestFit, MakesALabelOfEveryTokenButTheFirstOfItsDocument) {
  constexpr std::int64_t kLength = 20;
  const Random random(3, "documents");
  std::vector<std::int64_t> lengths{0, 1, 2, kLength, kLength + 1, kLength + 2, 5 * kLength};
  for (std::uint64_t i = 0; i < 2500; ++i)
    lengths.push_back(static_cast<std::int64_t>(random.bits(i) % 50));
  const BestFitDataset data(std::make_shared<Corpus>(corpus_of(lengths)), kLength, 7, true);
  std::map<std::int64_t, int> seen;  // labels by token
  std::int64_t num_labels = 0;
  const std::int64_t size = *data.size();
  const Batch batch = make_batch(data, 0, size);
  const auto* input = batch.input_ids_BL.const_data_ptr<std::int64_t>();
  const auto* label = batch.labels_BL.const_data_ptr<std::int64_t>();
  const auto* start = batch.document_starts_BL.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < size * kLength; ++i) {
    ASSERT_LE(start[i], i % kLength);
    if (label[i] == kIgnoredLabel) continue;
    ++num_labels, ++seen[label[i]];
    EXPECT_EQ(label[i], input[i] + 1) << "the next token of the same document";
    // All that it sees is of its document, without a hole.
    EXPECT_EQ(input[i] - input[i - (i % kLength - start[i])], i % kLength - start[i]);
  }
  std::int64_t expected = 0;
  for (std::size_t d = 0; d < lengths.size(); ++d)
    for (std::int64_t i = 1; i < lengths[d]; ++i, ++expected)
      EXPECT_EQ(seen[1000 * static_cast<std::int64_t>(d) + i], 1) << d << ", " << i;
  EXPECT_EQ(num_labels, expected);
  EXPECT_LT(size * kLength, expected * 106 / 100) << "sequences are nearly full";
  expect_parts(data.describe(), {"2507 documents", "by best fit", "% filled"});
}

// Two sequences are full, and one has 5 of 7 tokens.
TEST(BestFit, SaysHowMuchIsFilled) {
  const BestFitDataset data(std::make_shared<Corpus>(corpus_of({13, 3, 2})), 6, 7, true);
  EXPECT_EQ(data.describe(),
            "corpus: 3 documents, 18 tokens, 3 sequences of 6 by best fit, 90 % filled");
}

// Sequences that a long document fills are never listed: they are those that best fit has first.
TEST(BestFit, CountsTheSequencesThatLongDocumentsFill) {
  const std::int64_t length = 6;
  const std::vector<std::int64_t> lengths{3, 40, 0, 7, 1, 13, 25, 5, 2, 8};
  const Corpus corpus = corpus_of(lengths);
  std::vector<Piece> pieces;
  for (std::size_t d = 0; d < lengths.size(); ++d)
    for (std::int64_t i = 0; lengths[d] - i > 1; i += length)
      pieces.push_back({corpus.starts[d] + i, std::min(length + 1, lengths[d] - i)});
  const auto wanted = best_fit(pieces, length + 1);
  const BestFitDataset data(std::make_shared<Corpus>(corpus), length, 7, /*shuffle=*/false);
  ASSERT_EQ(*data.size(), std::ssize(wanted));
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    std::vector<TokenId> tokens;
    for (const Piece& p : wanted[i])
      tokens.insert(tokens.end(), corpus.tokens.begin() + p.begin,
                    corpus.tokens.begin() + p.begin + p.length);
    tokens.resize(static_cast<std::size_t>(length) + 1, 0);
    EXPECT_EQ(data.get(static_cast<std::int64_t>(i)).tokens, tokens) << i;
  }
}

// Two documents, one of 10^13 tokens: token i is i mod 1000.
class Endless final : public TokenStore {
 public:
  const std::string& name() const override { return name_; }
  const char* unit() const override { return "tokens"; }
  std::int64_t vocab_size() const override { return 1000; }
  std::int64_t num_tokens() const override { return 10'000'000'000'003; }
  std::int64_t num_documents() const override { return 2; }
  std::int64_t start(std::int64_t document) const override { return document == 0 ? 0 : 3; }
  void copy(std::int64_t begin, std::span<TokenId> to) const override {
    for (TokenId& id : to) id = static_cast<TokenId>(begin++ % 1000);
  }

 private:
  std::string name_ = "endless";
};

TEST(BestFit, TakesADocumentOfAnyLength) {
  const BestFitDataset data(std::make_shared<Endless>(), 100, 7, /*shuffle=*/false);
  EXPECT_EQ(*data.size(), 100'000'000'001);
  EXPECT_EQ(data.get(50'000'000'007).tokens.front(), 703);
  EXPECT_EQ(data.get(99'999'999'998).tokens.back(), 903);
  // What is left: 100 tokens of the second and 3 of the first, which do not fit together.
  EXPECT_EQ(data.get(99'999'999'999).tokens.front(), 903);
  EXPECT_EQ(data.get(100'000'000'000).tokens[2], 2);
}

// The next epoch has the same sequences in another order; without shuffling in the same.
TEST(BestFit, BeginsAgainAfterTheLastSequence) {
  const std::vector<std::int64_t> lengths(40, 3);
  for (const bool shuffle : {true, false}) {
    const BestFitDataset data(std::make_shared<Corpus>(corpus_of(lengths)), 6, 7, shuffle);
    ASSERT_EQ(*data.size(), 20);
    const auto epoch = [&](std::int64_t number) {
      std::vector<std::vector<TokenId>> all;
      for (std::int64_t i = 0; i < 20; ++i) all.push_back(data.get(20 * number + i).tokens);
      return all;
    };
    auto first = epoch(0), second = epoch(1);
    EXPECT_EQ(first == second, !shuffle);
    std::sort(first.begin(), first.end()), std::sort(second.begin(), second.end());
    EXPECT_EQ(first, second);
  }
}

TEST(BestFit, RefusesWhatHoldsNothingToLearn) {
  expect_parts(
      error_of([] { BestFitDataset(std::make_shared<Corpus>(corpus_of({1, 0, 1})), 4, 0, true); },
               ErrorKind::data),
      {"corpus has 3 documents and 2", "less than two"});
  expect_parts(
      error_of([] { BestFitDataset(std::make_shared<Corpus>(corpus_of({5})), 0, 0, true); },
               ErrorKind::config),
      {"sequence_length is 0"});
}

// What is read once is padding from its end on: nothing is learned there.
TEST(OneEpoch, EndsInPadding) {
  const PackedDataset data(std::make_shared<Corpus>(corpus_of({10})), 3, 0, false);
  const OneEpoch once(data);
  ASSERT_EQ(*once.size(), 3);
  for (std::int64_t i = 0; i < 3; ++i) EXPECT_EQ(once.get(i).tokens, data.get(i).tokens);
  const Batch batch = make_batch(once, 2, 3);
  EXPECT_EQ(batch.labels_BL.ne(kIgnoredLabel).sum().item<std::int64_t>(), 3);
  EXPECT_EQ(batch.input_ids_BL[2].sum().item<std::int64_t>(), 0);
}

}  // namespace
}  // namespace moesh::data
