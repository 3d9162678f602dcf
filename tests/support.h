#pragma once
// Helpers of tests that read files: a file which lives as long as its scope, and errors which say
// what they should.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "moesh/base/error.h"

namespace moesh {

class TemporaryFile {
 public:
  TemporaryFile(const std::string& name, const std::string& text) {
    static std::atomic<int> number = 0;
    const auto folder = std::filesystem::path(testing::TempDir()) /
                        ("moesh_test_" + std::to_string(getpid()) + "_" + std::to_string(number++));
    std::filesystem::create_directories(folder);
    path_ = (folder / name).string();
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove_all(std::filesystem::path(path_).parent_path(), ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// The text of the Error that `f` throws; empty if it throws none.
template <class F>
std::string error_of(F f, ErrorKind kind) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

/// Fails unless `text` has all the parts.
inline void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

}  // namespace moesh
