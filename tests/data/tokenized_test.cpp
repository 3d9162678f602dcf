// Text with a tokenizer, through the registry as a configuration opens it.

#include "moesh/data/tokenize.h"

#include <thread>

#include "moesh/data/registry.h"
#include "moesh/tokenizer/tokenizer.h"
#include "tests/data/small_tokenizer.h"
#include "tests/support.h"

namespace moesh::data {
namespace {

using std::filesystem::directory_iterator;

struct Files {
  TemporaryFile tokenizer{"tokenizer.json", small_tokenizer_json()};
  TemporaryFile jsonl{
      "corpus.jsonl",
      "{\"text\": \"these are seven words, se se\"}\n\n{\"text\": \"second one\"}\n"};
  std::string folder = std::filesystem::path(jsonl.path()).parent_path() / "tokens";

  DatasetOptions options(const std::string& path) const {
    return {.path = path,
            .sequence_length = 4,
            .vocab_size = 97,
            .shuffle = false,
            .tokenizer = tokenizer.path(),
            .token_folder = folder};
  }
  std::vector<TokenId> ids(const std::string& text) const {
    return tokenizer::Tokenizer(small_tokenizer_json(), "test").encode(text, false);
  }
  std::int64_t num_made() const {
    std::int64_t count = 0;
    for (const auto& entry : directory_iterator(folder))
      count += entry.path().extension() == ".bin";
    return count;
  }
};

TEST(Tokenized, GivesTheIdsOfEachDocument) {
  const Files files;
  const auto data = open_dataset(files.options(files.jsonl.path()));
  auto expected = files.ids("these are seven words, se se");
  const auto num_first = std::ssize(expected);
  for (const TokenId id : files.ids("second one")) expected.push_back(id);
  EXPECT_LT(num_first, std::ssize(std::string("these are seven words, se se"))) << "se is a token";
  ASSERT_EQ(*data->size(), (std::ssize(expected) - 1) / 4);
  for (std::int64_t i = 0; i < *data->size(); ++i) {
    const Sample sample = data->get(i);
    for (std::int64_t t = 0; t < 5; ++t) {
      const auto at = static_cast<std::size_t>(t);
      EXPECT_EQ(sample.tokens[at], expected[static_cast<std::size_t>(4 * i + t)]);
      EXPECT_EQ(sample.documents[at], 4 * i + t < num_first ? 0 : 1);
    }
  }
  const TemporaryFile text("corpus.txt", "these are\nseven words");
  const auto one = open_dataset(files.options(text.path()));
  const auto of_text = files.ids("these are\nseven words");
  EXPECT_EQ(one->get(0).tokens, (std::vector<TokenId>(of_text.begin(), of_text.begin() + 5)));
}

// The second run, and a process beside the first, find what is there; another text has other ids.
TEST(Tokenized, AreMadeOnce) {
  const Files files;
  {
    std::vector<std::jthread> at_once;
    for (int i = 0; i < 4; ++i)
      at_once.emplace_back([&] { open_dataset(files.options(files.jsonl.path())); });
  }
  EXPECT_EQ(files.num_made(), 1);
  const auto first = std::filesystem::last_write_time(directory_iterator(files.folder)->path());
  open_dataset(files.options(files.jsonl.path()));
  EXPECT_EQ(std::filesystem::last_write_time(directory_iterator(files.folder)->path()), first);
  std::ofstream(files.jsonl.path(), std::ios::app) << "{\"text\": \"a third\"}\n";
  expect_parts(open_dataset(files.options(files.jsonl.path()))->describe(), {"3 documents"});
  EXPECT_EQ(files.num_made(), 2);
}

TEST(Tokenized, NamesATokenizerThatDoesNotFit) {
  const Files files;
  auto options = files.options(files.jsonl.path());
  options.vocab_size = 90;
  expect_parts(error_of([&] { open_dataset(options); }, ErrorKind::config),
               {"data.tokenizer is", "97 tokens", "has 90", "model.vocab_size to 97"});
  options = files.options(files.jsonl.path());
  options.token_folder = "";
  expect_parts(error_of([&] { open_dataset(options); }, ErrorKind::config), {"data.token_folder"});
  options = files.options(files.jsonl.path());
  options.tokenizer = files.folder + "/none.json";
  expect_parts(error_of([&] { open_dataset(options); }, ErrorKind::config), {"none.json"});
}

}  // namespace
}  // namespace moesh::data
