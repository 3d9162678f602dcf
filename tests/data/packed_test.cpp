#include "moesh/data/packed.h"

#include <set>

#include "tests/support.h"

namespace moesh::data {
namespace {

using Numbers = std::vector<std::int64_t>;
using Ids = std::vector<TokenId>;

Corpus corpus_of(const std::vector<std::string>& documents) {
  Corpus corpus("corpus");
  for (const std::string& document : documents) corpus.add(document);
  return corpus;
}

TEST(Packed, SequencesFollowOneAnotherAndOverlapByOneToken) {
  const PackedDataset data(std::make_shared<Corpus>(corpus_of({"abc", "", "de"})), 3, 0,
                           false);  // a b c | d e |
  constexpr TokenId kEnd = kEndOfDocument;
  EXPECT_EQ(data.size().value(), 2);
  EXPECT_EQ(data.get(0).tokens, (Ids{'a', 'b', 'c', kEnd}));
  EXPECT_EQ(data.get(0).documents, (Numbers{0, 0, 0, 0}));
  EXPECT_EQ(data.get(1).tokens, (Ids{kEnd, 'd', 'e', kEnd}));
  EXPECT_EQ(data.get(1).documents, (Numbers{0, 1, 1, 1}));
  EXPECT_EQ(data.get(2).tokens, data.get(0).tokens);  // from the beginning
  EXPECT_EQ(data.describe(), "corpus: 2 documents, 7 tokens, 2 sequences of 3");
  EXPECT_EQ(PackedDataset(std::make_shared<Corpus>(corpus_of({"abc"})), 3, 0, false).describe(),
            "corpus: 1 document, 4 tokens, 1 sequences of 3");

  // The first token of a document is not to be predicted from the one before it.
  const Batch batch = make_batch(data, 0, 2);
  EXPECT_TRUE(at::equal(
      batch.labels_BL, at::tensor(Numbers{'b', 'c', kEnd, kIgnoredLabel, 'e', kEnd}).view({2, 3})));
  EXPECT_TRUE(at::equal(batch.input_ids_BL,
                        at::tensor(Numbers{'a', 'b', 'c', kEnd, 'd', 'e'}).view({2, 3})));
  EXPECT_TRUE(
      at::equal(batch.document_starts_BL, at::tensor(Numbers{0, 0, 0, 0, 1, 1}).view({2, 3})));
  EXPECT_EQ(batch.num_documents, 3);
}

// Whatever the length: put together again, the sequences are the text, and every token but the
// first is a label once.
TEST(Packed, NothingIsLostButTheEnd) {
  const Corpus corpus =
      corpus_of({"the first document", "x", "another one,\nwith two lines", "last"});
  const auto num_tokens = std::ssize(corpus.tokens);
  for (std::int64_t length = 1; length < num_tokens; ++length) {
    const PackedDataset data(std::make_shared<Corpus>(corpus), length, 0, false);
    Ids joined{corpus.tokens[0]};
    Numbers documents{0};
    for (std::int64_t i = 0; i < data.size().value(); ++i) {
      const Sample sample = data.get(i);
      EXPECT_EQ(sample.tokens.front(), joined.back());
      joined.insert(joined.end(), sample.tokens.begin() + 1, sample.tokens.end());
      documents.insert(documents.end(), sample.documents.begin() + 1, sample.documents.end());
    }
    EXPECT_LT(num_tokens - std::ssize(joined), length);
    for (std::size_t t = 0; t < joined.size(); ++t) {
      EXPECT_EQ(joined[t], corpus.tokens[t]);
      const bool starts = t > 0 && documents[t] != documents[t - 1];
      EXPECT_EQ(starts, t > 0 && joined[t - 1] == kEndOfDocument)
          << "length " << length << ", token " << t;
    }
  }
}

TEST(Packed, EveryEpochHasAllSequencesInAnotherOrder) {
  std::string text;
  for (int i = 0; i < 40; ++i) text += static_cast<char>('0' + i);
  const PackedDataset data(std::make_shared<Corpus>(corpus_of({text})), 1, 7, true),
      again(std::make_shared<Corpus>(corpus_of({text})), 1, 7, true);
  const auto epoch = [](const PackedDataset& d, std::int64_t number) {
    Numbers firsts;
    for (std::int64_t i = 0; i < d.size().value(); ++i)
      firsts.push_back(d.get(number * d.size().value() + i).tokens[0]);
    return firsts;
  };
  ASSERT_EQ(data.size().value(), 40);
  const Numbers first = epoch(data, 0), second = epoch(data, 1);
  EXPECT_EQ(std::set(first.begin(), first.end()).size(), 40u);
  EXPECT_EQ(std::set(second.begin(), second.end()).size(), 40u);
  EXPECT_NE(first, second);
  EXPECT_EQ(first, epoch(again, 0));
  EXPECT_NE(first,
            epoch(PackedDataset(std::make_shared<Corpus>(corpus_of({text})), 1, 8, true), 0));
  EXPECT_FALSE(std::is_sorted(first.begin(), first.end()));
}

TEST(Packed, TextFilesAreBytes) {
  const std::string bytes("a\0\xff\n", 4);
  const Corpus corpus = read_text_corpus(TemporaryFile("bytes.txt", bytes).path());
  EXPECT_EQ(corpus.tokens, (Ids{'a', 0, 255, '\n', 256}));
  EXPECT_EQ(corpus.starts, (Numbers{0}));
}

// The largest vocabulary of the five models has 201,088 words.
TEST(Packed, HoldsIdsThatNeedMoreThan16Bits) {
  Corpus corpus("ids", 201'088);
  corpus.tokens = {201'087, 65'535, 65'536, 0, 129'279}, corpus.starts = {0, 3};
  const PackedDataset data(std::make_shared<Corpus>(corpus), 4, 0, false);
  EXPECT_EQ(data.vocab_size(), 201'088);
  EXPECT_EQ(data.get(0).tokens, corpus.tokens);
  const Batch batch = make_batch(data, 0, 1);
  EXPECT_TRUE(
      at::equal(batch.input_ids_BL, at::tensor(Numbers{201'087, 65'535, 65'536, 0}).view({1, 4})));
  EXPECT_TRUE(at::equal(batch.labels_BL,
                        at::tensor(Numbers{65'535, 65'536, kIgnoredLabel, 129'279}).view({1, 4})));
}

TEST(Packed, SaysWhatIsWrongWithAFile) {
  const auto error = [](const std::string& path, std::int64_t length) {
    return error_of(
        [&] { PackedDataset(std::make_shared<Corpus>(read_text_corpus(path)), length, 0, true); },
        ErrorKind::data);
  };
  const TemporaryFile empty("empty.txt", ""), brief("brief.txt", "twelve bytes");
  expect_parts(error(empty.path(), 4), {empty.path(), "holds no text", "data.path"});
  expect_parts(error(brief.path(), 64), {brief.path(), "13 tokens", "data.sequence_length = 64",
                                         "needs 65", "to 12 or less"});
  EXPECT_EQ(
      PackedDataset(std::make_shared<Corpus>(read_text_corpus(brief.path())), 12, 0, true).size(),
      1);  // the cure works
  expect_parts(error("no_such_folder/corpus.txt", 4),
               {"no_such_folder/corpus.txt", "No such file"});
  expect_parts(
      error_of([&] { PackedDataset(std::make_shared<Corpus>(corpus_of({"a"})), 0, 0, true); },
               ErrorKind::config),
      {"sequence_length is 0"});
}

}  // namespace
}  // namespace moesh::data
