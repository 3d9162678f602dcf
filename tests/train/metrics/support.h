#pragma once
// What the tests of metrics have in common.

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace moesh::train {

/// All of a file.
inline std::string read(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace moesh::train
