#include "moesh/formats/safetensors.h"

#include <cstring>
#include <limits>

#include "moesh/base/random.h"
#include "tests/support.h"

namespace moesh::formats {
namespace {

using Metadata = std::map<std::string, std::string>;

std::string length_of(std::uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i) & 0xff);
  return bytes;
}

// A file with this header and so many bytes of data.
std::string file(const std::string& header, std::size_t data) {
  return length_of(header.size()) + header + std::string(data, 'x');
}

SafetensorsHeader parse(const std::string& bytes) { return parse_safetensors(bytes, bytes.size()); }

std::string error(const std::string& bytes) {
  return error_of([&] { parse(bytes); }, ErrorKind::data);
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

TEST(Safetensors, GivesTensorsInTheOrderOfTheirBytes) {
  const auto header = parse(file(
      R"({"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},"__metadata__":{"format":"pt"},)"
      R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}    )",
      16));
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0],
            (TensorInfo{.name = "a", .dtype = Dtype::f32, .shape = {}, .begin = 0, .end = 4}));
  EXPECT_EQ(
      header.tensors[1],
      (TensorInfo{.name = "b", .dtype = Dtype::bf16, .shape = {2, 3}, .begin = 4, .end = 16}));
  EXPECT_EQ(header.metadata, (Metadata{{"format", "pt"}}));
  EXPECT_EQ(header.find("b"), &header.tensors[1]);
  EXPECT_EQ(header.find("c"), nullptr);
  EXPECT_EQ(header.find(""), nullptr);
}

TEST(Safetensors, TakesWhatIsOddAndLegal) {
  EXPECT_TRUE(parse(file("{}", 0)).tensors.empty());
  EXPECT_TRUE(parse(file(R"({"__metadata__":null})", 0)).metadata.empty());
  EXPECT_EQ(parse(file(R"({"":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":[{}]}})", 1))
                .tensors.size(),
            1u);
  // Empty tensors are anywhere between the others, and the keys come in any order.
  const std::string empty = entry("F32", "[0,5]", "[4,4]");
  const auto header =
      parse(file(R"({"z":)" + empty + R"(,"d":)" + entry("I8", "[1]", "[4,5]") + R"(,"a":)" +
                     entry("F32", "[1]", "[0,4]") + R"(,"b":)" + empty + R"(,"c":)" +
                     entry("I8", "[0,4611686018427387904,2]", "[4,4]") + "}",
                 5));
  EXPECT_EQ(header.tensors.size(), 5u);
  EXPECT_EQ(header.tensors.front().name, "a");
  EXPECT_EQ(header.tensors.back().name, "d");
  EXPECT_EQ(parse(file(R"({"a":)" + entry("F4", "[3,2]", "[0,3]") + "}", 3)).tensors[0].dtype,
            Dtype::f4);
}

TEST(Safetensors, RefusesEveryAbuseOfOffsetsAndShapes) {
  const auto one = [](const std::string& dtype, const std::string& shape,
                      const std::string& offsets, std::size_t data) {
    return error(file(R"({"t":)" + entry(dtype, shape, offsets) + "}", data));
  };
  const auto two = [](const std::string& first, const std::string& second, std::size_t data) {
    return error(
        file(R"({"a":)" + entry("U8", "[4]", first) + R"(,"b":)" + entry("U8", "[4]", second) + "}",
             data));
  };
  expect_parts(two("[0,4]", "[2,6]", 6),
               {"tensor \"b\"", "begins at byte 2", "ends at 4", "overlap"});
  expect_parts(two("[0,4]", "[0,4]", 4), {"begins at byte 0", "overlap"});
  expect_parts(two("[0,4]", "[5,9]", 9), {"tensor \"b\"", "begins at byte 5", "hole"});
  expect_parts(two("[1,5]", "[5,9]", 9), {"tensor \"a\"", "hole"});
  expect_parts(two("[0,4]", "[4,8]", 7), {"end at byte 8", "which has 7", "cut off"});
  expect_parts(two("[0,4]", "[4,8]", 9), {"end at byte 8", "which has 9", "something follows"});
  expect_parts(one("U8", "[4]", "[4,0]", 4),
               {"tensor \"t\"", "begins at byte 4 and ends before, at 0"});
  expect_parts(one("F32", "[4]", "[0,4]", 4), {"tensor \"t\"", "has 4 bytes; [4] of F32 takes 16"});
  expect_parts(one("F32", "[4294967296,4294967296]", "[0,0]", 0),
               {"tensor \"t\"", "more than 2^64 elements"});
  expect_parts(one("F32", "[4294967296,4294967296,0]", "[0,0]", 0), {"more than 2^64 elements"});
  expect_parts(one("F32", "[4611686018427387904]", "[0,0]", 0), {"more than 2^64 bits"});
  expect_parts(one("F32", "[2305843009213693952]", "[0,0]", 0),
               {"more than 2^64 bits"});  // 2^63 bytes
  expect_parts(one("F4", "[3]", "[0,1]", 1), {"12 bits", "whole number of bytes"});
  expect_parts(one("F32", "[-1]", "[0,4]", 4), {"tensor \"t\"", "[-1]", "negative"});
  expect_parts(one("F32", "[1.0]", "[0,4]", 4), {"\"shape\" is a number", "whole number"});
  expect_parts(one("F32", "[9223372036854775808]", "[0,4]", 4), {"\"shape\"", "2^63 - 1"});
  expect_parts(one("F32", "1", "[0,4]", 4), {"\"shape\" is a whole number", "a list"});
  expect_parts(one("F32", "[1]", "[0,4,8]", 4), {"\"data_offsets\" has 3 numbers"});
  expect_parts(one("F32", "[1]", "[-4,0]", 4), {"\"data_offsets\" is -4", "negative"});
  expect_parts(one("F32", "[1]", "[0,18446744073709551616]", 4), {"\"data_offsets\"", "2^64 - 1"});
  expect_parts(one("F32", "[1]", "[0,18446744073709551615]", 4),
               {"has 18446744073709551615 bytes"});
  expect_parts(one("F33", "[1]", "[0,4]", 4), {"tensor \"t\"", "dtype is \"F33\""});
  expect_parts(one("f32", "[1]", "[0,4]", 4), {"dtype is \"f32\""});
}

TEST(Safetensors, RefusesHeadersThatAreNone) {
  expect_parts(error(""), {"it has 0 bytes", "eight"});
  expect_parts(error("1234567"), {"it has 7 bytes", "eight"});
  expect_parts(error(length_of(100'000'001) + "{}"),
               {"header would have 100000001 bytes", "100000000"});
  expect_parts(error(length_of(std::numeric_limits<std::uint64_t>::max()) + "{}"),
               {"18446744073709551615 bytes"});
  expect_parts(error(length_of(3) + "{}"), {"should have 3 bytes, and only 2 follow", "cut off"});
  expect_parts(error(file("", 0)), {"does not begin with '{'"});
  expect_parts(error(file(" {}", 0)), {"does not begin with '{'"});
  expect_parts(error(file("[]", 0)), {"does not begin with '{'"});
  expect_parts(error(file("{} x", 0)), {"not JSON"});
  expect_parts(error(file(std::string("{}\0\0", 4), 0)), {"byte 2 is a zero"});
  expect_parts(error(file("{\"\xff\":1}", 0)), {"not JSON", "UTF-8"});
  expect_parts(error(file(R"({"a":1})", 0)), {"tensor \"a\"", "its entry", "must be an object"});
  expect_parts(error(file(R"({"a":{"dtype":"F32","shape":[]}})", 0)),
               {"tensor \"a\"", "has no \"data_offsets\""});
  expect_parts(error(file(R"({"a":{"dtype":7,"shape":[],"data_offsets":[0,4]}})", 4)),
               {"\"dtype\"", "must be a text"});
  expect_parts(error(file(R"({"__metadata__":{"a":1}})", 0)),
               {"\"a\" is a whole number", "a text"});
  expect_parts(error(file(R"({"__metadata__":[]})", 0)), {"\"__metadata__\"", "an object"});
  const std::string tensor = entry("U8", "[1]", "[0,1]");
  expect_parts(error(file(R"({"a":)" + tensor + R"(,"a":)" + tensor + "}", 1)),
               {"\"a\"", "comes twice"});
  expect_parts(
      error(file(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1)),
      {"\"dtype\"", "comes twice"});
  expect_parts(error(file(R"({"__metadata__":{"a":"1","a":"1"}})", 0)), {"\"a\"", "comes twice"});
  expect_parts(error(file(R"({"a":)" + std::string(200, '[') + std::string(200, ']') + "}", 0)),
               {"nested deeper"});
}

TEST(Safetensors, NoTruncationAndNoFlippedLengthIsTaken) {
  std::vector<TensorInfo> tensors = {{.name = "a", .shape = {3}},
                                     {.name = "b", .dtype = Dtype::i8, .shape = {5}}};
  const std::string whole = write_safetensors_header(tensors, {{"k", "v"}}) + std::string(17, 'x');
  EXPECT_EQ(parse(whole).tensors.size(), 2u);
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_FALSE(error(whole.substr(0, size)).empty()) << size;
  EXPECT_FALSE(error(whole + "x").empty());
  for (std::size_t bit = 0; bit < 64; ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
    EXPECT_FALSE(error(flipped).empty()) << bit;
  }
}

TEST(Safetensors, EveryTypeHasItsSizeAndIsAligned) {
  std::vector<TensorInfo> tensors;
  for (int i = 0; i <= static_cast<int>(Dtype::f6_e3m2); ++i) {
    const auto dtype = static_cast<Dtype>(i);
    tensors.push_back({.name = std::string(name_of(dtype)), .dtype = dtype, .shape = {3, 4}});
  }
  const std::vector<TensorInfo> before = tensors;
  const std::string header = write_safetensors_header(tensors, {});
  EXPECT_EQ(header.size() % 8, 0u);
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(tensors[i].name, before[i].name) << "the order given is kept";
    total = std::max(total, tensors[i].end);
    if (tensors[i].dtype >= Dtype::f4) {
      expect_parts(error_of([&] { size_of(tensors[i].dtype); }, ErrorKind::data),
                   {tensors[i].name, "shares its byte"});
      continue;
    }
    EXPECT_EQ(tensors[i].end - tensors[i].begin, 12 * size_of(tensors[i].dtype));
    EXPECT_EQ(tensors[i].begin % size_of(tensors[i].dtype), 0u) << tensors[i].name;
  }
  const auto read = parse_safetensors(header, header.size() + total);
  for (const TensorInfo& tensor : tensors) EXPECT_EQ(*read.find(tensor.name), tensor);
}

TEST(Safetensors, WhatIsWrittenReadsBackTheSame) {
  const Random random(3, "safetensors");
  std::uint64_t index = 0;
  const auto below = [&](std::uint64_t bound) { return random.below(index++, bound); };
  for (int round = 0; round < 500; ++round) {
    std::vector<TensorInfo> tensors(below(12));
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      tensors[i].name = "layer." + std::to_string(i) + (below(2) ? "\n\"ü" : "");
      tensors[i].dtype = static_cast<Dtype>(below(static_cast<std::uint64_t>(Dtype::f4)));
      tensors[i].shape.resize(below(4));
      for (auto& length : tensors[i].shape) length = static_cast<std::int64_t>(below(6));
    }
    Metadata metadata;
    for (std::uint64_t n = below(3); n > 0; --n)
      metadata[std::to_string(n)] = std::string(below(5), '\\');
    const std::string header = write_safetensors_header(tensors, metadata);
    std::uint64_t total = 0;
    for (const TensorInfo& tensor : tensors) total = std::max(total, tensor.end);

    const auto read = parse_safetensors(header, header.size() + total);
    EXPECT_EQ(read.data_start, header.size());
    EXPECT_EQ(read.metadata, metadata);
    ASSERT_EQ(read.tensors.size(), tensors.size());
    for (const TensorInfo& tensor : tensors) {
      ASSERT_NE(read.find(tensor.name), nullptr);
      EXPECT_EQ(*read.find(tensor.name), tensor);
    }
  }
}

TEST(Safetensors, RefusesToWriteWhatItWouldNotRead) {
  const auto refused = [](std::vector<TensorInfo> tensors) {
    return error_of([&] { write_safetensors_header(tensors, {}); }, ErrorKind::data);
  };
  expect_parts(refused({{.name = "a"}, {.name = "a"}}), {"\"a\"", "two of this name"});
  expect_parts(refused({{.name = "__metadata__"}}), {"__metadata__", "reserves this name"});
  expect_parts(refused({{.name = "a", .shape = {-1}}}), {"tensor \"a\"", "negative"});
  expect_parts(refused({{.name = "\xff"}}), {"not UTF-8"});
  expect_parts(refused({{.name = std::string(100'000'001, 'a')}}),
               {"header of 1 tensors", "fewer tensors"});
}

TEST(Safetensors, AHundredThousandTensorsAreFoundByName) {
  constexpr int kTensors = 100'000;
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < kTensors; ++i)
    tensors.push_back({.name = "model.layers." + std::to_string(i / 1000) + ".mlp.experts." +
                               std::to_string(i % 1000) + ".weight",
                       .shape = {2}});
  const std::string header = write_safetensors_header(tensors, {});
  const auto read = parse_safetensors(header, header.size() + kTensors * 8);
  for (const TensorInfo& tensor : tensors)
    ASSERT_EQ(*read.find(tensor.name), tensor);  // quadratic, this would take minutes
}

TEST(SafetensorsFile, ReadsByRange) {
  std::vector<TensorInfo> tensors = {{.name = "a", .dtype = Dtype::i32, .shape = {4}}};
  std::string bytes = write_safetensors_header(tensors, {});
  for (std::int32_t value : {10, 11, 12, 13})
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  const TemporaryFile on_disk("model.safetensors", bytes);
  SafetensorsFile opened(on_disk.path());
  const SafetensorsFile file = std::move(opened);
  EXPECT_EQ(file.path(), on_disk.path());
  EXPECT_EQ(file.size(), bytes.size());
  std::array<std::int32_t, 2> middle;
  file.read(file.header().data_start + file.header().find("a")->begin + 4,
            std::as_writable_bytes(std::span(middle)));
  EXPECT_EQ(middle, (std::array<std::int32_t, 2>{11, 12}));
  expect_parts(
      error_of([&] { file.read(bytes.size() - 4, std::as_writable_bytes(std::span(middle))); },
               ErrorKind::data),
      {on_disk.path(), "cannot read 8 bytes"});
  std::filesystem::resize_file(on_disk.path(), bytes.size() - 8);
  expect_parts(
      error_of([&] { file.read(bytes.size() - 8, std::as_writable_bytes(std::span(middle))); },
               ErrorKind::data),
      {on_disk.path(), "something else writes to it"});
}

TEST(SafetensorsFile, ErrorsNameTheFile) {
  const TemporaryFile cut("model.safetensors", file("{}", 1));
  expect_parts(error_of([&] { SafetensorsFile{cut.path()}; }, ErrorKind::data),
               {cut.path() + ": ", "something follows"});
  const TemporaryFile text("model.safetensors", "not at all a safetensors file");
  expect_parts(error_of([&] { SafetensorsFile{text.path()}; }, ErrorKind::data),
               {text.path() + ": ", "another format"});
  const TemporaryFile empty("model.safetensors", "");
  expect_parts(error_of([&] { SafetensorsFile{empty.path()}; }, ErrorKind::data),
               {empty.path() + ": ", "0 bytes"});
}

}  // namespace
}  // namespace moesh::formats
