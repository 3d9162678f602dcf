#include "moesh/cli/usage.h"

#include <sstream>

namespace moesh::cli {

std::string usage_of(const std::string& all, const std::string& command) {
  std::istringstream lines(all);
  std::string found;
  bool is_within = false;
  for (std::string line; std::getline(lines, line);) {
    const bool begins = line.size() > 2 && line.starts_with("  ") && line[2] != ' ';
    if (begins || line.empty())
      is_within = begins && (line.substr(2) + " ").starts_with(command + " ");
    if (is_within) found += line + "\n";
  }
  return found;
}

}  // namespace moesh::cli
