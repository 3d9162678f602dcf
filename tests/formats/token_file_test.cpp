#include "moesh/formats/token_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "moesh/base/error.h"

namespace moesh::formats {
namespace {

template <class T>
std::string bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Two documents, of two sequences and of one, as 16-bit ids.
std::string index(const std::vector<std::int32_t>& lengths = {2, 1, 3},
                  const std::vector<std::int64_t>& offsets = {0, 4, 6},
                  const std::vector<std::int64_t>& documents = {0, 2, 3}) {
  return token_index_header(IdType::uint16, std::ssize(lengths), std::ssize(documents) - 1) +
         bytes(lengths) + bytes(offsets) + bytes(documents);
}

std::string npy(const std::string& header, const std::string& data, char version = 1) {
  std::string text("\x93NUMPY");
  text += version;
  text += '\0';
  const auto size = static_cast<std::uint32_t>(header.size());
  text.append(reinterpret_cast<const char*>(&size), version == 1 ? 2 : 4);
  return text + header + data;
}
const std::string kShape3 = "{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }\n";

template <class F>
void expect_error(F f, const std::string& reason) {
  try {
    f();
    ADD_FAILURE() << "nothing was refused; expected: " << reason;
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::data);
    EXPECT_NE(std::string(e.what()).find(reason), std::string::npos) << e.what();
    EXPECT_TRUE(std::string(e.what()).starts_with("x")) << e.what();
  }
}

TEST(TokenIndex, ReadsSequencesAndDocuments) {
  const std::string text = index();
  const TokenIndex found = parse_token_index(text, 12, "x.idx");
  EXPECT_EQ(found.type, IdType::uint16);
  EXPECT_EQ(found.num_sequences, 3);
  EXPECT_EQ(found.num_documents, 2);
  EXPECT_EQ(found.length(2), 3);
  EXPECT_EQ(found.offset(2), 6);
  EXPECT_EQ(found.first_sequence(1), 2);
}

TEST(TokenIndex, RefusesOneThatLies) {
  const auto refuse = [](const std::string& text, const std::string& reason,
                         std::uint64_t bin_size = 12) {
    expect_error([&] { parse_token_index(text, bin_size, "x.idx"); }, reason);
  };
  refuse("", "not an index");
  refuse("MMIDIDY" + index().substr(7), "not an index");
  refuse(index().substr(0, index().size() - 1), "cut off");
  refuse(index() + "\1", "more than its header says");
  refuse(index(), "the .bin has 14", 14);
  refuse(index({2, -1, 3}), "sequence 1 has -1");
  refuse(index({2, 1, 3}, {0, 2, 6}), "sequence 1");
  refuse(index({2, 1, 3}, {0, 4, 6}, {0, 3, 2}), "document 2");
  refuse(index({2, 1, 3}, {0, 4, 6}, {1, 3}), "document 0");
  refuse(index({2, 1, 3}, {0, 4, 6}, {0, 2}), "end at sequence 2");
  refuse(index({2, 1, 3}, {0, 4, 6}, {}), "too few");
  std::string other = index();
  other[9] = 2;
  refuse(other, "version 2");
  other = index();
  other[17] = 7;
  refuse(other, "type 7");
  other = index();
  std::memset(other.data() + 18, 0xFF, 8);
  refuse(other, "too few");
}

TEST(Npy, ReadsIntegers) {
  const NpyHeader header = parse_npy(npy(kShape3, "abcdef"), "x.npy");
  EXPECT_EQ(header.type, IdType::uint16);
  EXPECT_EQ(header.sizes, std::vector<std::int64_t>{3});
  EXPECT_EQ(header.data_start, 10 + kShape3.size());
  EXPECT_EQ(parse_npy(npy(kShape3, "abcdef", 2), "x.npy").data_start, 12 + kShape3.size());
}

// As NumPy's own: its header is a multiple of 64 bytes and ends with a line.
TEST(Npy, ReadsWhatItWrites) {
  for (const std::vector<std::int64_t>& sizes :
       {std::vector<std::int64_t>{}, {0}, {7}, {2, 3}, {0, 4}, {1, 2, 3, 4}, {1000000, 0, 3}})
    for (const IdType type : {IdType::uint8, IdType::int16, IdType::int32, IdType::int64}) {
      std::int64_t count = 1;
      for (const auto n : sizes) count *= n;
      const std::string header = npy_header(type, sizes);
      EXPECT_EQ(header.size() % 64, 0u);
      EXPECT_EQ(header.back(), '\n');
      const NpyHeader read = parse_npy(
          header + std::string(static_cast<std::size_t>(count) * size_of(type), 'x'), "x");
      EXPECT_EQ(read.type, type);
      EXPECT_EQ(read.sizes, sizes);
      EXPECT_EQ(read.data_start, header.size());
    }
  const std::int64_t sizes[] = {2, 3};
  EXPECT_TRUE(npy_header(IdType::int16, sizes)
                  .substr(10)
                  .starts_with("{'descr': '<i2', 'fortran_order': False, 'shape': (2, 3), }"));
}

TEST(Npy, RefusesWhatItIsNot) {
  const auto refuse = [](const std::string& text, const std::string& reason) {
    expect_error([&] { parse_npy(text, "x.npy"); }, reason);
  };
  refuse("", "not an .npy");
  refuse(npy(kShape3, "abcde"), "cut off");
  refuse(npy(kShape3, "abcdef").substr(0, 20), "cut off");
  refuse(npy("{'descr': '<f4', 'shape': (1,), }", "abcd"), "<f4");
  refuse(npy("{'descr': '>i4', 'shape': (1,), }", "abcd"), ">i4");
  refuse(npy("{'descr': '<i4', 'shape': (1, 2), }", "abcd"), "says (1, 2) of 4 bytes");
  refuse(npy("{'descr': '<i4', 'shape': (4294967296, 4294967296), }", ""), "cut off");
  refuse(npy("{'descr': '<i4', 'shape': (1 2), }", "abcd"), "no shape");
  refuse(npy("{'descr': '<i4', 'shape': (-1,), }", "abcd"), "no shape");
  refuse(npy("{'descr': '<i4', 'shape': (1", "abcd"), "no shape");
  refuse(npy("{'descr': '<i4', 'fortran_order': True, 'shape': (1, 1), }", "abcd"), "innermost");
  refuse(npy("{}", ""), "type");
}

class Files : public testing::Test {
 protected:
  Files() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path(testing::TempDir()) / (std::string("tokens_") + test->name());
    std::filesystem::create_directories(folder_);
  }
  ~Files() override { std::filesystem::remove_all(folder_); }
  std::string put(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return (folder_ / name).string();
  }
  std::filesystem::path folder_;
};

TEST_F(Files, AreReadByAnyOfTheirNames) {
  const std::string bin = put("x.bin", bytes<std::uint16_t>({5, 6, 7, 8, 9, 65535}));
  const std::string idx = put("x.idx", index());
  for (const std::string& path : {bin, idx, bin.substr(0, bin.size() - 4)}) {
    const TokenFile file = TokenFile::open_indexed(path);
    EXPECT_EQ(file.num_tokens(), 6);
    EXPECT_EQ(file.num_documents(), 2);
    EXPECT_EQ(file.start(0), 0);
    EXPECT_EQ(file.start(1), 3);
    std::vector<std::int32_t> ids(3);
    file.copy(1, 65536, ids);
    EXPECT_EQ(ids, (std::vector<std::int32_t>{6, 7, 8}));
  }
}

TEST_F(Files, NameTheIdThatIsBeyondTheVocabulary) {
  const std::string flat = put("x.bin", bytes<std::uint32_t>({5, 6, 100'000, 8}));
  const TokenFile file = TokenFile::open_flat(flat, IdType::uint32);
  EXPECT_EQ(file.num_documents(), 1);
  std::vector<std::int32_t> ids(4);
  file.copy(0, 100'001, ids);
  EXPECT_EQ(ids[2], 100'000);
  const auto error = [&](std::int64_t vocab_size) {
    try {
      file.copy(1, vocab_size, std::span(ids).subspan(1));
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_NE(error(100'000).find("x.bin: token 2 has the id 100000"), std::string::npos);
  EXPECT_EQ(error(100'001), "");
  const std::string below =
      put("y.npy", npy("{'descr': '<i4', 'shape': (1,), }", bytes<std::int32_t>({-3})));
  EXPECT_THROW(TokenFile::open_npy(below).copy(0, 10, std::span(ids).first(1)), Error);
  EXPECT_THROW(
      TokenFile::open_npy(put("z.npy", npy("{'descr': '|u1', 'shape': (2, 2), }", "abcd"))), Error)
      << "not one dimension";
  EXPECT_THROW(TokenFile::open_flat(put("odd.bin", "abc"), IdType::uint16), Error);
  EXPECT_THROW(TokenFile::open_flat(folder_.string(), IdType::uint16), Error);
}

// 20 GB that no disk has to hold: what is read is what costs memory.
TEST_F(Files, MayBeLargerThanMemory) {
  constexpr std::uint64_t kBytes = 20'000'000'000;
  const std::string path = put("huge.bin", "");
  std::filesystem::resize_file(path, kBytes);
  const TokenFile file = TokenFile::open_flat(path, IdType::uint16);
  EXPECT_EQ(file.num_tokens(), static_cast<std::int64_t>(kBytes / 2));
  std::vector<std::int32_t> ids(1000);
  for (std::int64_t at = 0; at + 1000 < file.num_tokens(); at += file.num_tokens() / 200)
    file.copy(at, 1, ids);
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmRSS:")) {
      EXPECT_LT(std::stol(line.substr(6)), 200'000) << "kB";
    }
}

}  // namespace
}  // namespace moesh::formats
