#pragma once
// A file that an option names for a result: --out, --json.

#include <string>

namespace moesh::cli {

/// Opened before the work whose result it gets. Does not wait for a pipe without a reader. Errors
/// name the option: of kind config where the path cannot be a file, storage where the disk refuses.
class NamedOutput {
 public:
  NamedOutput(std::string option, std::string path);
  ~NamedOutput();
  NamedOutput(const NamedOutput&) = delete;
  NamedOutput& operator=(const NamedOutput&) = delete;

  void write(const std::string& text);

 private:
  [[noreturn]] void fail(int code) const;

  std::string option_, path_;
  int descriptor_;
};

}  // namespace moesh::cli
