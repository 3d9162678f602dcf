#include <sstream>

#include "moesh/formats/checksum.h"
#include "moesh/formats/json.h"
#include "moesh/formats/json_lines.h"
#include "moesh/formats/toml.h"
#include "tests/support.h"

namespace moesh::formats {
namespace {

TEST(NoToml, SaysThatItWasLeftOut) {
  EXPECT_FALSE(has_toml());
  const TemporaryFile file("run.toml", "a = 1\n");
  expect_parts(error_of([&] { read_toml(file.path()); }, ErrorKind::config),
               {file.path(), "built without toml++", "libtomlplusplus-dev", "--section.key=value"});
  EXPECT_EQ(to_toml(0.5), "0.5");  // writing needs no parser
}

TEST(NoJson, SaysThatItWasLeftOut) {
  EXPECT_FALSE(has_json());
  std::istringstream lines("{\"text\": \"a\"}\n");
  expect_parts(
      error_of([&] { each_json_text(lines, "a.jsonl", "text", [](const std::string&) {}); },
               ErrorKind::data),
      {"a.jsonl", "built without nlohmann/json", "nlohmann-json3-dev"});
}

TEST(NoJson, SaysSoOfEveryFormatThatIsJson) {
  for (const std::string& text :
       {error_of([] { parse_json("{}", "config.json"); }, ErrorKind::data),
        error_of([] { to_json({}); }, ErrorKind::data),
        error_of([] { json_quoted(""); }, ErrorKind::data)})
    expect_parts(text, {"built without nlohmann/json", "MOESH_JSON_INCLUDE"});
}

TEST(NoXxhash, SaysThatItWasLeftOut) {
  EXPECT_FALSE(has_checksums());
  expect_parts(error_of([] { hash_block("x"); }, ErrorKind::config),
               {"built without xxHash", "libxxhash-dev", "MOESH_XXHASH_INCLUDE"});
}

}  // namespace
}  // namespace moesh::formats
