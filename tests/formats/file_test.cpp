#include "moesh/formats/file.h"

#include "tests/support.h"

namespace moesh::formats {
namespace {

TEST(File, GivesEveryByte) {
  std::string bytes;
  for (int i = 0; i < 200'000; ++i) bytes += static_cast<char>(i % 256);
  EXPECT_EQ(read_file(TemporaryFile("bytes.bin", bytes).path(), ErrorKind::data), bytes);
  EXPECT_EQ(read_file(TemporaryFile("empty", "").path(), ErrorKind::data), "");
}

TEST(File, SaysWhyItCannotBeRead) {
  const std::string missing = testing::TempDir() + "no_such_file.toml";
  expect_parts(error_of([&] { read_file(missing, ErrorKind::config); }, ErrorKind::config), {missing, "No such file"});
  expect_parts(error_of([&] { read_file(testing::TempDir(), ErrorKind::data); }, ErrorKind::data), {"it is a folder"});
}

}  // namespace
}  // namespace moesh::formats
