#include "moesh/data/packed.h"
#include "moesh/data/registry.h"
#include "tests/support.h"

namespace moesh::data {
namespace {

TEST(Jsonl, EveryLineIsADocument) {
  const TemporaryFile file(
      "corpus.jsonl",
      "{\"text\": \"ab\"}\n{\"text\": \"\"}\n\n{\"text\": \"\\u00fc\", \"id\": 3}\n");
  const Corpus corpus = read_jsonl_corpus(file.path());
  EXPECT_EQ(corpus.tokens, (std::vector<TokenId>{'a', 'b', 256, 0xc3, 0xbc, 256}));
  EXPECT_EQ(corpus.starts, (std::vector<std::int64_t>{0, 3}));
  const auto data = open_dataset(
      {.path = file.path(), .sequence_length = 5, .vocab_size = 300, .shuffle = false});
  EXPECT_EQ(data->get(0).documents, (std::vector<std::int64_t>{0, 0, 0, 1, 1, 1}));
}

TEST(Jsonl, ABadLineIsNamed) {
  const TemporaryFile bad("corpus.jsonl", "{\"text\": \"fine\"}\n{\"text\": }\n"),
      empty("empty.jsonl", "\n\n{\"text\": \"\"}\n");
  const auto open = [](const std::string& path) {
    open_dataset({.path = path, .sequence_length = 2, .vocab_size = 300});
  };
  expect_parts(error_of([&] { open(bad.path()); }, ErrorKind::data),
               {bad.path() + ":2: ", "not JSON"});
  expect_parts(error_of([&] { open(empty.path()); }, ErrorKind::data),
               {empty.path(), "holds no text"});
}

}  // namespace
}  // namespace moesh::data
