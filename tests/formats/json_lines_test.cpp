#include "moesh/formats/json.h"

#include <sstream>

#include "tests/support.h"

namespace moesh::formats {
namespace {

std::vector<std::string> texts(const std::string& lines) {
  std::istringstream in(lines);
  std::vector<std::string> all;
  each_json_text(in, "corpus.jsonl", "text", [&](const std::string& text) { all.push_back(text); });
  return all;
}

TEST(JsonLines, GivesTheTextOfEveryLine) {
  EXPECT_EQ(
      texts(
          "{\"text\": \"one\"}\n\n  \t\r\n{\"id\": 7, \"text\": \"gr\\u00fcn\\n\"}\r\n{\"text\": \"\"}"),
      (std::vector<std::string>{"one", "grün\n", ""}));
  EXPECT_TRUE(texts("").empty());
}

TEST(JsonLines, LongLinesAndNulAreErrors) {
  const std::string nul = std::string("{\"text\": \"a\"}") + '\0' + "{\"text\": \"b\"}";
  expect_parts(error_of([&] { texts(nul + "\n"); }, ErrorKind::data), {"corpus.jsonl:1:", "NUL"});
  const std::string longest = "{\"text\": \"" + std::string(kMaxLineBytes, 'x') + "\"}";
  expect_parts(error_of([&] { texts(longest); }, ErrorKind::data), {"this line has", "split"});
}

TEST(JsonLines, ErrorsNameFileAndLine) {
  const auto error = [](const std::string& lines) {
    return error_of([&] { texts("{\"text\": \"fine\"}\n\n" + lines); }, ErrorKind::data);
  };
  expect_parts(error("{\"text\": \"cut off\n"),
               {"corpus.jsonl:3: ", "not JSON", "{\"text\": \"...\"}"});
  expect_parts(error("{\"text\": \"\xff\"}\n"), {"corpus.jsonl:3: ", "not JSON"});
  expect_parts(error("{\"text\": \"a\"} {\"text\": \"b\"}\n"), {"corpus.jsonl:3: ", "not JSON"});
  expect_parts(error("[1, 2]\n"), {"corpus.jsonl:3: ", "JSON array"});
  expect_parts(error("{\"body\": \"a\"}\n"), {"corpus.jsonl:3: ", "no \"text\""});
  expect_parts(error("{\"text\": 5}\n"), {"corpus.jsonl:3: ", "JSON number"});
  expect_parts(error("{\"text\": null}\n"), {"corpus.jsonl:3: ", "JSON null"});
}

TEST(JsonLines, DeepNestingIsAnErrorOrIgnoredAndNoCrash) {
  const std::string deep(200'000, '[');
  expect_parts(error_of([&] { texts(deep); }, ErrorKind::data), {"corpus.jsonl:1: "});
  EXPECT_EQ(
      texts("{\"text\": \"a\", \"other\": " + deep + std::string(deep.size(), ']') + "}").size(),
      1u);
}

}  // namespace
}  // namespace moesh::formats
