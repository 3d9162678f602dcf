#pragma once
// Files from outside, with errors that name the file and the reason.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "moesh/base/error.h"

namespace moesh::formats {

/// The bytes of a file; `kind` is that of the Error when it cannot be read.
std::string read_file(const std::string& path, ErrorKind kind);

/// A file that is read by range: a regular one, or a symlink to one. A folder, a pipe or a device
/// is refused, and never waited for. Errors are of kind data.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  /// Bytes from `offset` on, as many as `to` has room for. Threads may read at the same time.
  void read(std::uint64_t offset, std::span<std::byte> to) const;
  /// All of it; refused where it has more than `max_size` bytes.
  std::string read_all(std::uint64_t max_size) const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

}  // namespace moesh::formats
