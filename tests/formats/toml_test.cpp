#include "moesh/formats/toml.h"

#include <cmath>
#include <limits>

#include "tests/support.h"

namespace moesh::formats {
namespace {

TEST(Toml, IsAFlatListInTheOrderOfItsLines) {
  const auto entries = parse_toml(
      "# a run\n"
      "title = \"first\"\n"
      "[training]\n"
      "steps = 1_000\n"
      "lr = 1e-3  # a comment\n"
      "[data]\n"
      "shuffle = false\n"
      "a.b = 'c'\n"
      "inline = { x = 1, y = 2.5 }\n",
      "run.toml");
  const std::vector<TomlEntry> expected{
      {"title", std::string("first"), 2}, {"training.steps", std::int64_t{1000}, 4},
      {"training.lr", 1e-3, 5},           {"data.shuffle", false, 7},
      {"data.a.b", std::string("c"), 8},  {"data.inline.x", std::int64_t{1}, 9},
      {"data.inline.y", 2.5, 9}};
  EXPECT_EQ(entries, expected);
  EXPECT_TRUE(parse_toml("", "empty.toml").empty());
}

TEST(Toml, AListOfTextsIsOneWithCommas) {
  const std::vector<TomlEntry> expected{
      {"names", std::string("a.*,b"), 1}, {"one", std::string("c"), 2}, {"none", std::string(), 3}};
  EXPECT_EQ(parse_toml("names = ['a.*', \"b\"]\none = ['c']\nnone = []\n", "run.toml"), expected);
}

TEST(Toml, ReadsFiles) {
  const TemporaryFile file("run.toml", "[a]\r\nb = true\r\n");
  EXPECT_EQ(read_toml(file.path()), (std::vector<TomlEntry>{{"a.b", true, 2}}));
}

TEST(Toml, ErrorsNameFileAndLine) {
  const auto error = [](const std::string& text) {
    return error_of([&] { parse_toml(text, "run.toml"); }, ErrorKind::config);
  };
  expect_parts(error("[training]\nsteps = \n"), {"run.toml:2: "});
  expect_parts(error("[training\nsteps = 1\n"), {"run.toml:1: "});
  expect_parts(error("a = 1\n\na = 2\n"), {"run.toml:3: "});    // twice
  expect_parts(error("a = 1\nb = three\n"), {"run.toml:2: "});  // a text without quotes
  expect_parts(error("a = 1\nb = 99999999999999999999\n"), {"run.toml:2: "});
  expect_parts(error("a = \"\xff\"\n"), {"run.toml:1: "});  // not UTF-8
  expect_parts(error("x = 1\n[m]\nsizes = [1, 2]\n"), {"run.toml:3: ", "m.sizes is a list"});
  expect_parts(error("names = [\"a\", \"b,c\"]\n"), {"run.toml:1: ", "names is a list"});
  expect_parts(error("names = [\"a\", 1]\n"), {"run.toml:1: ", "names is a list"});
  expect_parts(error("day = 1979-05-27\n"), {"run.toml:1: ", "day is a date"});
  const std::string missing = testing::TempDir() + "missing.toml";
  expect_parts(error_of([&] { read_toml(missing); }, ErrorKind::config), {missing});
}

TEST(Toml, WrittenValuesReadBackTheSame) {
  const std::vector<TomlValue> values{
      true,
      false,
      std::int64_t{0},
      std::int64_t{-7},
      std::numeric_limits<std::int64_t>::max(),
      std::numeric_limits<std::int64_t>::min(),
      0.0,
      1.0,
      -2.5,
      0.1,
      1e-8,
      1e300,
      6.02214076e23,
      std::nextafter(1.0, 2.0),
      std::numeric_limits<double>::denorm_min(),
      std::numeric_limits<double>::infinity(),
      -std::numeric_limits<double>::infinity(),
      std::string(),
      std::string("plain"),
      std::string("C:\\data \"quoted\"\n\ttab\r\x01\x7f # no comment"),
      std::string("grün")};
  for (const TomlValue& value : values) {
    const auto entries = parse_toml("key = " + to_toml(value), "written");
    ASSERT_EQ(entries.size(), 1u);
    EXPECT_EQ(entries[0].value, value) << to_toml(value);
  }
  const auto nan = parse_toml("key = " + to_toml(std::nan("")), "written");
  EXPECT_TRUE(std::isnan(std::get<double>(nan.at(0).value)));
}

// The parser's own assertions fail on the last of these: found by toml_fuzz.
TEST(Toml, WhatIsNoTextIsAnErrorAndNotTheEndOfTheProgram) {
  for (const std::string& text : {std::string("a = 1\n\0", 7), std::string("[a\x01]"),
                                  std::string("[\1\0\0\t[a]]\nb  = {d = 1}}\n", 24)})
    expect_parts(error_of([&] { parse_toml(text, "file"); }, ErrorKind::config),
                 {"file:", "control character"});
}

TEST(Toml, AKeyHasAName) {
  for (const char* text : {"\"\" = 1", "[\"\"]\na = 1"})
    expect_parts(error_of([&] { parse_toml(text, "file"); }, ErrorKind::config),
                 {"file:1:", "a key without a name"});
}

TEST(Toml, OtherLettersAreInTextsAndComments) {
  for (const char* text : {"a = \"gr\u00f6\u00dfe\"", "a = 1 # gr\u00f6\u00dfe",
                           "a = '''\n\u0412'\n'''", "a = \"\"\"\u0412\"\"\"\"\"  # \u0412",
                           "a = \"\\\"\u0412\"", "\"\u0412\" = 'a\\' # \u0412"})
    EXPECT_EQ(parse_toml(text, "file").size(), 1u) << text;
  for (const char* text : {"a =\u0412", "gr\u00f6\u00dfe = 1", "a = 'x' \u0412", "a = \"\"\u0412"})
    expect_parts(error_of([&] { parse_toml(text, "file"); }, ErrorKind::config),
                 {"file:1:", "outside of quotes", "\\x"});
  for (const char* text : {"a = \"\\\u00e9\"", "a = \"\"\"b \\\n \ufefd\"\"\""})
    expect_parts(error_of([&] { parse_toml(text, "file"); }, ErrorKind::config),
                 {"file:1:", "follow a backslash"});
}

TEST(Toml, KeysOfManyPartsAreRefusedBeforeTheyAreParsed) {
  std::string key = "a";
  for (int i = 0; i < 50'000; ++i) key += ".a";
  for (const std::string& text :
       {"x = 1\n" + key + " = 1", "x = 1\n[" + key + "]", "x = 1\ny = {" + key + " = 1}"})
    expect_parts(error_of([&] { parse_toml(text, "deep.toml"); }, ErrorKind::config),
                 {"deep.toml:2: ", "a key of more than 100 parts"});
  const std::string dots(5000, '.');
  EXPECT_EQ(parse_toml("path = \"/a/" + dots.substr(0, 90) + "/b\"", "fine").size(), 1u);
  expect_parts(
      error_of([&] { parse_toml(std::string(kMaxTomlBytes + 1, ' '), "t"); }, ErrorKind::config),
      {"at most 16777216"});
}

}  // namespace
}  // namespace moesh::formats
