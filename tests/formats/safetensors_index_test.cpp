#include "moesh/formats/safetensors.h"

#include "tests/support.h"

namespace moesh::formats {
namespace {

SafetensorsIndex parse_index(const std::string& text) {
  return parse_safetensors_index(text, "index.json");
}

std::string index_error(const std::string& text) {
  return error_of([&] { parse_index(text); }, ErrorKind::data);
}

TEST(SafetensorsIndex, ReadsWhatHuggingFaceWrites) {
  const auto index = parse_index(R"({"metadata": {"total_parameters": 5, "total_size": 20},
    "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors", "a": "model-00001-of-00002.safetensors",
                   "b": "model-00001-of-00002.safetensors"}})");
  EXPECT_EQ(index.total_size, 20u);
  EXPECT_EQ(index.weight_map.at("lm_head.weight"), "model-00002-of-00002.safetensors");
  EXPECT_EQ(index.files(), (std::vector<std::string>{"model-00001-of-00002.safetensors",
                                                     "model-00002-of-00002.safetensors"}));
  EXPECT_EQ(parse_index(R"({"weight_map": {}})"), SafetensorsIndex());
  EXPECT_EQ(parse_index(R"({"weight_map": {}, "metadata": null})"), SafetensorsIndex());
  EXPECT_EQ(parse_index(R"({"weight_map": {}, "metadata": {"total_size": 1.5e9}})").total_size,
            1'500'000'000u);
  EXPECT_EQ(parse_index(R"({"weight_map": {}, "metadata": {"total_size": 18446744073709551615}})")
                .total_size,
            ~std::uint64_t{0});
}

TEST(SafetensorsIndex, WhatIsWrittenReadsBackTheSame) {
  for (const SafetensorsIndex& index :
       {SafetensorsIndex{}, SafetensorsIndex{.weight_map = {{"a\n", "x.safetensors"}, {"", "y"}},
                                             .total_size = ~std::uint64_t{0}}}) {
    EXPECT_EQ(parse_index(write_safetensors_index(index)), index);
  }
  EXPECT_EQ(
      write_safetensors_index({.weight_map = {{"a", "x.safetensors"}}, .total_size = 4}),
      "{\n  \"metadata\": {\n    \"total_size\": 4\n  },\n  \"weight_map\": {\n    \"a\": \"x.safetensors\"\n  }\n}\n");
}

TEST(SafetensorsIndex, FilesAreNamesAndNotPaths) {
  for (const std::string name :
       {"../secret", "/etc/passwd", "a/b", "a\\\\b", "..", "", ".hidden", "a\\u0000b", "..\\\\x"})
    expect_parts(index_error(R"({"weight_map": {"t": ")" + name + "\"}}"),
                 {"index.json: ", "does not name a file of this folder"});
  expect_parts(
      error_of([] { write_safetensors_index({.weight_map = {{"a", "../x"}}}); }, ErrorKind::data),
      {"\"../x\"", "dot"});
}

TEST(SafetensorsIndex, ErrorsNameTheFileAndTheKey) {
  expect_parts(index_error("{"), {"index.json is not JSON"});
  expect_parts(index_error("[]"), {"index.json: ", "\"index\" is a list"});
  expect_parts(index_error("{}"), {"index.json: ", "no \"weight_map\""});
  expect_parts(index_error(R"({"weight_map": []})"), {"\"weight_map\" is a list"});
  expect_parts(index_error(R"({"weight_map": {"t": 3}})"), {"\"t\" is a whole number", "a text"});
  expect_parts(index_error(R"({"weight_map": {"t": "a", "t": "b"}})"), {"\"t\"", "comes twice"});
  expect_parts(index_error(R"({"weight_map": {}, "weight_map": {}})"),
               {"\"weight_map\"", "comes twice"});
  expect_parts(index_error("{\"weight_map\": {\"\xff\": \"a\"}}"), {"not JSON", "UTF-8"});
  for (const char* size : {"-1", "1.5", "1e300", "-0.5"})
    expect_parts(
        index_error(std::string(R"({"weight_map": {}, "metadata": {"total_size": )") + size + "}}"),
        {"metadata.total_size"});
  const std::string missing = testing::TempDir() + "no_such_index.json";
  expect_parts(error_of([&] { read_safetensors_index(missing); }, ErrorKind::data),
               {missing, "No such file"});
}

TEST(SafetensorsIndex, IsReadFromAFile) {
  const TemporaryFile file(kIndexFile, R"({"weight_map": {"a": "b"}})");
  EXPECT_EQ(read_safetensors_index(file.path()).weight_map.at("a"), "b");
}

}  // namespace
}  // namespace moesh::formats
