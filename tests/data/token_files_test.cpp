// Training data from files of token ids, through the registry as a configuration opens them.

#include <fstream>
#include <set>

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
               {flat.path(), "set data.kind to uint16 or uint32"});
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

// Documents of which some tokens are to be predicted and some only read, in a file with its mask.
class MaskedFile {
 public:
  static constexpr std::int32_t kTokens = 61;

  MaskedFile() : bin_("x.bin", bytes(counted(kTokens))) {
    prefix_ = bin_.path().substr(0, bin_.path().size() - 4);
    std::string index = formats::token_index_header(formats::IdType::int32, 4, 4);
    index += bytes<std::int32_t>({9, 1, 30, 21}) + bytes<std::int64_t>({0, 36, 40, 160});
    std::ofstream(prefix_ + ".idx", std::ios::binary)
        << index + bytes<std::int64_t>({0, 1, 2, 3, 4});
    for (std::int32_t i = 0; i < kTokens; ++i) mask_ += static_cast<char>(i % 7 < 3);
    write(mask_);
  }
  void write(const std::string& mask) const {
    std::ofstream(prefix_ + ".mask", std::ios::binary) << mask;
  }
  const std::string& path() const { return bin_.path(); }
  const std::string& mask() const { return mask_; }
  /// Trained, and not the first of a document: nothing comes before it.
  std::multiset<std::int64_t> labels() const {
    std::multiset<std::int64_t> all;
    for (std::int32_t i = 0; i < kTokens; ++i)
      if (mask_[static_cast<std::size_t>(i)] && i != 0 && i != 9 && i != 10 && i != 40)
        all.insert(100'000 + i);
    return all;
  }

 private:
  TemporaryFile bin_;
  std::string prefix_, mask_;
};

// However documents become sequences, every trained token is a label once, and no other one is.
TEST(LossMasks, LeaveTheirLabelsAfterPacking) {
  const MaskedFile file;
  for (const char* packing : {"cut", "best_fit"})
    for (const std::int64_t length : {4, 5, 12, 20})
      for (const bool shuffle : {false, true}) {
        auto o = options(file.path());
        o.sequence_length = length, o.shuffle = shuffle, o.packing = packing;
        const auto data = open_dataset(o);
        const Batch batch = make_batch(*data, 0, data->size().value());
        std::multiset<std::int64_t> found;
        const auto* labels = batch.labels_BL.const_data_ptr<std::int64_t>();
        const auto* inputs = batch.input_ids_BL.const_data_ptr<std::int64_t>();
        for (std::int64_t i = 0; i < batch.labels_BL.numel(); ++i) {
          if (labels[i] == kIgnoredLabel) continue;
          found.insert(labels[i]);
          EXPECT_EQ(labels[i], inputs[i] + 1) << "the label of another token";
        }
        auto expected = file.labels();
        if (std::string(packing) == "cut")  // drops what is left over at the end
          expected.erase(expected.upper_bound(100'000 + data->size().value() * length),
                         expected.end());
        EXPECT_EQ(found, expected) << packing << ", length " << length;
      }
}

TEST(LossMasks, ThatDoNotFitTheirTokensAreRefused) {
  const MaskedFile file;
  file.write(file.mask().substr(1));
  expect_parts(error_of([&] { open_dataset(options(file.path())); }, ErrorKind::data),
               {".mask has 60 bytes", "x.bin has 61 tokens", "tokenize again"});
  std::string wrong = file.mask();
  wrong[7] = 2;
  file.write(wrong);
  expect_parts(error_of([&] { open_dataset(options(file.path()))->get(1); }, ErrorKind::data),
               {"x.bin", "byte 7 of its .mask is 2", "it takes 1"});
}

}  // namespace
}  // namespace moesh::data
