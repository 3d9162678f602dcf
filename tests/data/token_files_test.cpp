// Training data from files of token ids, through the registry as a configuration opens them.

#include <fstream>

#include "moesh/data/packed.h"
#include "moesh/data/registry.h"
#include "moesh/formats/token_file.h"
#include "tests/support.h"

namespace moesh::data {
namespace {

template <class T>
std::string bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::vector<std::int32_t> counted(std::int32_t count) {
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < count; ++i) ids.push_back(100'000 + i);
  return ids;
}

DatasetOptions options(const std::string& path) {
  return {.path = path, .sequence_length = 4, .vocab_size = 200'000, .shuffle = false};
}

TEST(TokenFiles, GiveSequencesWithTheirDocuments) {
  const TemporaryFile bin("x.bin", bytes(counted(14)));
  const std::string idx = bin.path().substr(0, bin.path().size() - 4) + ".idx";
  // Documents of 3, 0 and 11 tokens.
  std::ofstream(idx, std::ios::binary)
      << formats::token_index_header(formats::IdType::int32, 3, 3) +
             bytes<std::int32_t>({3, 0, 11}) + bytes<std::int64_t>({0, 12, 12}) +
             bytes<std::int64_t>({0, 1, 2, 3});
  for (const std::string& path : {bin.path(), idx}) {
    const auto data = open_dataset(options(path));
    EXPECT_EQ(data->vocab_size(), 200'000);
    EXPECT_EQ(data->get(0).tokens,
              (std::vector<TokenId>{100'000, 100'001, 100'002, 100'003, 100'004}));
    EXPECT_EQ(data->get(0).documents, (std::vector<std::int64_t>{0, 0, 0, 2, 2}));
    EXPECT_EQ(data->get(2).tokens.back(), 100'012);
    EXPECT_EQ(data->get(3).tokens, data->get(0).tokens);  // three sequences, then again
    expect_parts(data->describe(), {"3 documents", "14 tokens", "3 sequences of 4"});
  }
}

// By somebody else, while a run reads it.
TEST(TokenFiles, SayThatTheyWereCutShort) {
  const TemporaryFile flat("x.bin", bytes(counted(9000)));
  auto of_ids = options(flat.path());
  of_ids.kind = "uint32";
  const auto data = open_dataset(of_ids);
  data->get(2000);
  std::filesystem::resize_file(flat.path(), 4000);
  EXPECT_EQ(data->get(0).tokens.front(), 100'000);
  expect_parts(error_of([&] { data->get(2000); }, ErrorKind::data),
               {"x.bin", "had 36000 when it was opened", "something else writes to it"});
}

TEST(TokenFiles, AreTheSameTokensInEveryKind) {
  const auto ids = counted(9);
  const std::string header = "{'descr': '<i4', 'fortran_order': False, 'shape': (9,), }\n";
  std::string npy("\x93NUMPY\1\0", 8);
  npy += static_cast<char>(header.size());
  npy += '\0';
  const TemporaryFile as_npy("x.npy", npy + header + bytes(ids));
  const TemporaryFile flat("x.bin", bytes(ids));
  auto flat_options = options(flat.path());
  flat_options.kind = "uint32";
  const auto a = open_dataset(options(as_npy.path())), b = open_dataset(flat_options);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(a->get(i).tokens, std::vector<TokenId>(ids.begin() + 4 * i, ids.begin() + 4 * i + 5));
    EXPECT_EQ(a->get(i).tokens, b->get(i).tokens);
    EXPECT_EQ(a->get(i).documents, std::vector<std::int64_t>(5, 0));
  }
  // Without an index and without a kind nothing says how large an id is.
  expect_parts(error_of([&] { open_dataset(options(flat.path())); }, ErrorKind::config),
               {flat.path(), "data.kind = uint16 or uint32"});
}

TEST(TokenFiles, NameFileAndPositionOfAnIdBeyondTheVocabulary) {
  auto ids = counted(20);
  ids[13] = 200'000;
  const TemporaryFile flat("x.bin", bytes(ids));
  auto o = options(flat.path());
  o.kind = "uint32";
  const auto data = open_dataset(o);
  data->get(0);
  expect_parts(error_of([&] { data->get(3); }, ErrorKind::data),
               {flat.path(), "token 13 has the id 200000", "has 200000"});
}

}  // namespace
}  // namespace moesh::data
