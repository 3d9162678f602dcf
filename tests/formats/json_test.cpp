#include "moesh/formats/json.h"

#include <cmath>
#include <limits>

#include "moesh/base/random.h"
#include "tests/support.h"

namespace moesh::formats {
namespace {

std::string json_error(const std::string& text, const JsonLimits& limits = {}) {
  return error_of([&] { parse_json(text, "config.json", limits); }, ErrorKind::data);
}

TEST(Json, KeepsEveryKindOfValueAndTheOrderOfKeys) {
  const JsonValue value = parse_json(
      R"( {"z": null, "a": true, "n": -3, "big": 18446744073709551615, "real": 1.0, "text": "gr\u00fcn", "list": [1, {}]} )",
      "x");
  const JsonObject expected = {{"z", {nullptr}},
                               {"a", {true}},
                               {"n", {std::int64_t{-3}}},
                               {"big", {std::numeric_limits<std::uint64_t>::max()}},
                               {"real", {1.0}},
                               {"text", {std::string("grün")}},
                               {"list", {JsonList{{std::int64_t{1}}, {JsonObject{}}}}}};
  EXPECT_EQ(value, JsonValue{expected});
  EXPECT_EQ(parse_json(to_json(value), "x"), value);
  EXPECT_TRUE(value.at("z", "x").is_null());
  EXPECT_EQ(value.at("n", "x").as_int("n"), -3);
  EXPECT_EQ(value.at("n", "x").as_number("n"), -3.0);
  EXPECT_EQ(value.at("big", "x").as_size("big"), std::numeric_limits<std::uint64_t>::max());
  EXPECT_TRUE(value.at("a", "x").as_bool("a"));
  EXPECT_EQ(value.find("missing"), nullptr);
}

TEST(Json, ALineIsTheSameValueWithoutBlanks) {
  const std::string line = R"({"z":null,"real":0.5,"empty":{},"list":[1,{"a":"b c"},[]]})";
  const JsonValue value = parse_json(line, "x");
  EXPECT_EQ(to_json_line(value), line + "\n");
  EXPECT_EQ(to_json_line({JsonObject{}}), "{}\n");
}

TEST(Json, MinusZeroIsNoWholeNumber) {
  const JsonValue zero = parse_json("-0", "x");
  ASSERT_TRUE(std::holds_alternative<double>(zero.value));
  EXPECT_TRUE(std::signbit(std::get<double>(zero.value)));
  EXPECT_EQ(to_json(zero), "-0.0\n");
}

TEST(Json, ErrorsNameTheValueAndWhatItMustBe) {
  const JsonValue value =
      parse_json(R"({"a": "x", "n": -1, "r": 1.5, "big": 9223372036854775808})", "x");
  const auto of = [&](auto f) { return error_of(f, ErrorKind::data); };
  expect_parts(of([&] { value.at("a", "x").as_int("a"); }), {"\"a\" is a text", "whole number"});
  expect_parts(of([&] { value.at("n", "x").as_size("n"); }), {"\"n\" is -1", "negative"});
  expect_parts(of([&] { value.at("r", "x").as_int("r"); }), {"\"r\" is a number", "whole number"});
  expect_parts(of([&] { value.at("big", "x").as_int("big"); }),
               {"\"big\" is a whole number", "2^63 - 1"});
  expect_parts(of([&] { value.at("b", "config"); }), {"\"config\" has no \"b\""});
  expect_parts(of([&] { value.at("a", "x").at("b", "a"); }), {"\"a\" is a text", "an object"});
  expect_parts(of([&] { value.as_list("config"); }), {"\"config\" is an object", "a list"});
}

TEST(Json, WhatIsNotJsonIsRefused) {
  for (const char* text : {"", " ", "{", "{\"a\": 1,}", "[1 2]", "{} {}", "nul", "{'a': 1}",
                           "\"\t\"", "01", "1e999", "// x\n1", "\"\\ud800\"", "NaN", "{\"a\"}"})
    expect_parts(json_error(text), {"config.json is not JSON"});
  expect_parts(json_error("\"\xff\""), {"not JSON", "UTF-8"});
  expect_parts(json_error("\"\xc0\xaf\""),
               {"not JSON", "UTF-8"});  // a slash in more bytes than it needs
  // The parser below takes a zero byte for the end.
  expect_parts(json_error(std::string("{}\0", 3)), {"not JSON", "byte 2 is a zero"});
  for (const char c : json_error(std::string("[\"\x1b\xff")))
    EXPECT_TRUE(c >= 0x20 && c < 0x7f) << "an error text must print: " << static_cast<int>(c);
}

TEST(Json, AKeyMayComeOnce) {
  expect_parts(json_error(R"({"a": 1, "b": 2, "a": 1})"), {"config.json", "\"a\"", "comes twice"});
  expect_parts(json_error(R"({"x": [{"b": {"a": 1, "\u0061": 1}}]})"), {"\"a\"", "comes twice"});
  EXPECT_NO_THROW(parse_json(R"({"a": {"a": 1}, "b": {"a": 1}})", "x"));
}

TEST(Json, LimitsHold) {
  const auto nested = [](std::size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_NO_THROW(parse_json(nested(127), "x"));
  expect_parts(json_error(nested(128)), {"nested deeper than 127"});
  expect_parts(json_error(std::string(1'000'000, '[')), {"nested deeper"});
  expect_parts(json_error("[0,0,0]", {.max_values = 3}), {"more than 3 values"});
  EXPECT_NO_THROW(parse_json("[0,0,0]", "x", {.max_values = 4}));
  expect_parts(json_error("[0,0,0]", {.max_bytes = 6}), {"7 bytes", "6"});
}

TEST(Json, RefusesToWriteWhatJsonCannotSay) {
  expect_parts(error_of([] { to_json({std::nan("")}); }, ErrorKind::data), {"JSON has no nan"});
  expect_parts(error_of([] { json_quoted("\xff"); }, ErrorKind::data), {"\\xff", "not UTF-8"});
  EXPECT_EQ(json_quoted("a\"\n"), R"("a\"\n")");
}

// A random value of random depth.
JsonValue random_value(const Random& random, std::uint64_t& index, int depth) {
  switch (random.below(index++, depth > 0 ? 8 : 6)) {
    case 0: return {nullptr};
    case 1: return {random.below(index++, 2) == 1};
    case 2:
      return {-1 -
              static_cast<std::int64_t>(random.bits(index++) >> random.below(index++, 63) >> 1)};
    case 3: return {random.bits(index++) | std::uint64_t{1} << 63};
    case 4:
      return {
          std::ldexp(random.normal(index++), static_cast<int>(random.below(index++, 1000)) - 500)};
    case 5: {
      std::string text;
      for (std::uint64_t n = random.below(index++, 9); n > 0; --n)
        text += static_cast<char>(random.below(index++, 128));
      return {text + (random.below(index++, 2) ? "ü" : "")};
    }
    case 6: {
      JsonList list;
      for (std::uint64_t n = random.below(index++, 5); n > 0; --n)
        list.push_back(random_value(random, index, depth - 1));
      return {list};
    }
    default: {
      JsonObject object;
      for (std::uint64_t n = random.below(index++, 5); n > 0; --n)
        object.emplace_back(std::to_string(n) + "\x01\"", random_value(random, index, depth - 1));
      return {object};
    }
  }
}

TEST(Json, WhatIsWrittenReadsBackTheSame) {
  const Random random(7, "json");
  std::uint64_t index = 0;
  for (int i = 0; i < 2000; ++i) {
    const JsonValue value = random_value(random, index, 5);
    ASSERT_EQ(parse_json(to_json(value), "x"), value) << to_json(value);
  }
}

TEST(Json, IsReadFromAFile) {
  const TemporaryFile file("config.json", "{\"a\": 1}\n");
  EXPECT_EQ(read_json(file.path()).at("a", "x").as_int("a"), 1);
  expect_parts(error_of([&] { read_json(file.path(), {.max_bytes = 3}); }, ErrorKind::data),
               {file.path(), "9 bytes", "at most 3"});
  const TemporaryFile broken("config.json", "{");
  expect_parts(error_of([&] { read_json(broken.path()); }, ErrorKind::data),
               {broken.path(), "is not JSON"});
}

}  // namespace
}  // namespace moesh::formats
