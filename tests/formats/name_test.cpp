#include "moesh/formats/name.h"

#include "tests/support.h"

namespace moesh::formats {
namespace {

TEST(Name, IsShownWithoutWritingToTheTerminal) {
  EXPECT_EQ(shown("model.norm"), "\"model.norm\"");
  EXPECT_EQ(shown("a\"b\\c"), "\"a\\\"b\\\\c\"");
  EXPECT_EQ(shown("a\x1b[2J\n\xff"), "\"a\\x1b[2J\\x0a\\xff\"");
  EXPECT_EQ(shown(std::string(1000, 'x')).size(), 200u + 5);
}

TEST(Name, OfAFileIsNoPath) {
  for (const char* name :
       {"model.safetensors", "model-00001-of-00002.safetensors", "a", "a..b", "~x", "grün"}) {
    EXPECT_NO_THROW(check_file_name(name)) << name;
    EXPECT_NO_THROW(check_file_path(name)) << name;
    EXPECT_NO_THROW(check_file_path(std::string("optimizer/") + name)) << name;
  }
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"", "it is empty"},
      {".", "dot"},
      {"..", "dot"},
      {".hidden", "dot"},
      {"../model", "dot"},
      {"/etc/passwd", "path"},
      {"a\\b", "path"},
      {"a/../../b", "path"},
      {"a/", "path"},
      {"C:\\x", "path"},
      {std::string("a\0b", 3), "control"},
      {"a\nb", "control"},
      {std::string(256, 'a'), "longer than 255"}};
  for (const auto& [name, reason] : wrong)
    expect_parts(error_of([&] { check_file_name(name); }, ErrorKind::data),
                 {"does not name a file of this folder", reason});
}

TEST(Name, OfAFileInAFolderLeadsNowhereElse) {
  for (const char* path : {"", "/", "/a", "a/", "a//b", "../a", "a/..", "./a", "a/.b", ".a/b",
                           "a/b/c", "a/b\\c", "a\\b/c", "..", "a/../b"})
    expect_parts(error_of([&] { check_file_path(path); }, ErrorKind::data),
                 {"does not name a file of this folder"});
}

}  // namespace
}  // namespace moesh::formats
