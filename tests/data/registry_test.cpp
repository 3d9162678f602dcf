#include "moesh/data/registry.h"

#include <sys/resource.h>

#include <cstdlib>

#include "moesh/data/dataset.h"
#include "tests/support.h"

namespace moesh::data {
namespace {

TEST(OpenDataset, TakesTheKindFromThePath) {
  EXPECT_EQ(resolved_kind("auto", ""), "synthetic");
  EXPECT_EQ(resolved_kind("auto", "a/b.jsonl"), "jsonl");
  EXPECT_EQ(resolved_kind("auto", "a/b.txt"), "text");
  EXPECT_EQ(resolved_kind("text", "a/b.jsonl"), "text");

  const auto synthetic =
      open_dataset({.sequence_length = 9, .vocab_size = 33, .seed = 6, .synthetic_successors = 3});
  EXPECT_EQ(synthetic->vocab_size(), 33);
  EXPECT_EQ(synthetic->get(4).tokens,
            SyntheticLanguage({.vocab_size = 33, .sequence_length = 9, .successors = 3, .seed = 6})
                .get(4)
                .tokens);
  expect_parts(synthetic->describe(), {"33 tokens", "nats"});

  const TemporaryFile file("corpus.txt", "some text that is long enough");
  const auto text = open_dataset(
      {.path = file.path(), .sequence_length = 4, .vocab_size = 257, .shuffle = false});
  EXPECT_EQ(text->get(0).tokens, (std::vector<TokenId>{'s', 'o', 'm', 'e', ' '}));
  EXPECT_FALSE(text->entropy().has_value());

  const auto error = [](const DatasetOptions& o) {
    return error_of([&] { open_dataset(o); }, ErrorKind::config);
  };
  expect_parts(error({.kind = "csv", .path = "a.csv"}), {"kind is 'csv'", "jsonl"});
  expect_parts(error({.kind = "text"}), {"no path"});
  expect_parts(error({.kind = "synthetic", .path = "a.txt", .vocab_size = 9}),
               {"a.txt", "leave out one"});
  expect_parts(error({.path = file.path(), .sequence_length = 4, .vocab_size = 96}),
               {"257 different tokens", "96", "vocab_size = 257"});
}

TEST(OpenDataset, MixesSources) {
  const TemporaryFile a("a.txt", "aaaaaaaa"), b("b.jsonl", "{\"text\": \"bbbbbbbb\"}\n");
  DatasetOptions options{.path = a.path(), .sequence_length = 3, .vocab_size = 257};
  options.sources = {{.path = a.path(), .name = "first"}, {.path = b.path(), .name = "second"}};
  const auto mixed = open_dataset(options);
  EXPECT_EQ(mixed->get(0).tokens[0], 'a');
  EXPECT_EQ(mixed->get(1).tokens[0], 'b');
  options.sources.push_back({.kind = "csv", .path = a.path(), .name = "third"});
  const std::string error = error_of([&] { open_dataset(options); }, ErrorKind::config);
  EXPECT_EQ(error.find("number 3"), std::string::npos) << "its own error: " << error;
}

TEST(DatasetKinds, SayWhatIsBytes) {
  for (const auto& kind : dataset_kinds())
    EXPECT_EQ(kind.num_tokens, kind.name == "text" || kind.name == "jsonl" ? 257 : 0) << kind.name;
}

// In a process of its own: what is lowered stays so.
TEST(OpenDatasetDeathTest, RaisesTheLimitOfOpenFilesAtNeedAndNamesItWhereItIsTooLow) {
  const std::string ids(64, 1);
  const TemporaryFile file("ids.bin", ids);
  DatasetOptions options{.sequence_length = 4, .vocab_size = 300};
  for (int i = 0; i < 100; ++i)
    options.sources.push_back({.kind = "uint16", .path = file.path(), .name = std::to_string(i)});
  const auto with_limits = [&](rlim_t soft, rlim_t hard) {
    const rlimit limits{.rlim_cur = soft, .rlim_max = hard};
    if (::setrlimit(RLIMIT_NOFILE, &limits) != 0) std::exit(3);
    try {
      open_dataset(options);
    } catch (const Error& e) {
      std::fprintf(stderr, "%s\n", e.what());
      std::exit(1);
    }
    std::exit(0);
  };
  EXPECT_EXIT(with_limits(40, 500), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(with_limits(40, 60), testing::ExitedWithCode(1),
              "source '[0-9]+', number [0-9]+ of 100: .*Too many open files; a process may have 60 "
              "open at once here .ulimit -Hn.: raise that limit, or open fewer");
}

TEST(OpenDataset, RefusesAFileOfAnUnknownKind) {
  for (const char* name : {"a.parquet", "a.jsonl.gz", "a", "a.tokens"}) {
    const TemporaryFile file(name, "something");
    const auto text = error_of([&] { resolved_kind("auto", file.path(), "data.source.3.kind"); },
                               ErrorKind::config);
    expect_parts(
        text, {file.path(), "set data.source.3.kind to text, jsonl", "uint16", "moesh tokenize"});
    EXPECT_EQ(text.find("auto"), std::string::npos) << text;
  }
}

// What is wrong with the name comes before what is wrong with the kind.
TEST(OpenDataset, NamesWhatIsNotThere) {
  const auto error = [](const std::string& path) {
    return error_of([&] { resolved_kind("auto", path); }, ErrorKind::config);
  };
  const TemporaryFile bin("corpus.bin", ""), file("a", "");
  const std::string prefix = bin.path().substr(0, bin.path().size() - 4);
  expect_parts(error(prefix + ".parquet"), {"there is no file '" + prefix + ".parquet'"});
  expect_parts(error(std::filesystem::path(file.path()).parent_path().string()),
               {"is a folder", "name a file"});
  std::ofstream(prefix + ".idx") << "";
  expect_parts(error(prefix), {prefix + ".bin and " + prefix + ".idx", "name one of them"});
}

TEST(DatasetKinds, GiveTheChoicesAndTheHelp) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(dataset_choices(),
            (Names{"auto", "synthetic", "text", "jsonl", "indexed", "npy", "uint16", "uint32"}));
  EXPECT_EQ(dataset_choices(/*reads_file=*/true),
            (Names{"auto", "text", "jsonl", "indexed", "npy", "uint16", "uint32"}));
  EXPECT_EQ(dataset_choices(/*reads_file=*/false), (Names{"auto", "synthetic"}));
  EXPECT_EQ(
      dataset_help(),
      "format of the data; auto: jsonl for *.jsonl, text for *.txt, indexed for *.bin, indexed for "
      "*.idx, npy for *.npy");
  for (const auto& kind : dataset_kinds()) {
    EXPECT_TRUE(kind.reads_file || kind.extensions.empty()) << kind.name;
    for (const auto& ending : kind.extensions)
      EXPECT_EQ(resolved_kind("auto", "folder/file" + ending), kind.name);
  }
}

}  // namespace
}  // namespace moesh::data
