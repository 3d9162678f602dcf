#pragma once
// Files from outside, with errors that name the file and the reason.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "moesh/base/error.h"

namespace moesh::formats {

/// The bytes of a regular file, at most `max_size`; `kind` is that of the Error when it is not one.
std::string read_file(const std::string& path, ErrorKind kind,
                      std::uint64_t max_size = std::numeric_limits<std::uint64_t>::max());

/// The same for a text that may come through a pipe, as of `--config <(command)`: what is written
/// to it until it is closed, `max_size` bytes at most, for which it waits `seconds` and no longer.
std::string read_file_or_pipe(const std::string& path, ErrorKind kind, std::uint64_t max_size,
                              double seconds = 10);

/// Throws "cannot <what> '<path>': <reason of the errno>". It is of kind data where the path names
/// nothing, or something else than it should, and of kind storage where the system failed: that is
/// no damage.
[[noreturn]] void fail_at(const std::filesystem::path& path, const char* what, int code);

/// False only where the file system says that there is nothing; what else goes wrong is an Error
/// (storage).
bool exists(const std::filesystem::path& path);

/// A folder, or a link to one.
bool is_folder(const std::filesystem::path& path);
/// The same, and false for a link: what is behind it belongs to somebody else.
bool is_own_folder(const std::filesystem::path& path);

/// What is in a folder, sorted; nothing where it does not exist. Whatever else goes wrong is an
/// Error: a folder that cannot be listed is not empty.
std::vector<std::string> names_in(const std::filesystem::path& folder);

/// A file that is read by range: a regular one, or a symlink to one. A folder, a pipe or a device
/// is refused, and never waited for. Errors are of kind data, or storage where the system cannot
/// read what is there; reads that fail are tried again first.
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
  /// What is read next comes from the disk, where the system can do that. A `size` of 0: all
  /// behind.
  void forget_cached(std::uint64_t offset = 0, std::uint64_t size = 0) const;
  /// All of it; refused where it has more than `max_size` bytes.
  std::string read_all(std::uint64_t max_size) const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

}  // namespace moesh::formats
