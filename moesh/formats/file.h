#pragma once
// Files from outside, with errors that name the file and the reason.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/formats/checksum.h"

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
/// The same, and false for a link: its target belongs to someone else.
bool is_own_folder(const std::filesystem::path& path);

/// The entries of a folder, sorted; none if it does not exist. Whatever else goes wrong is an
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
  /// Fills `to` with the bytes from `offset` on. Threads may read at the same time.
  void read(std::uint64_t offset, std::span<std::byte> to) const;
  /// The next read comes from the disk, if the system can do that. A `size` of 0: all
  /// behind.
  void forget_cached(std::uint64_t offset = 0, std::uint64_t size = 0) const;
  /// All of it; refused where it has more than `max_size` bytes.
  std::string read_all(std::uint64_t max_size) const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

// Files that are written by range, with errors that name the file, what failed and why.

inline constexpr const char* kRoomCure = "choose a folder that can be written and has room";

class OutputFile {
 public:
  enum class Mode { create, open, open_or_create };
  /// `cure` is what errors (storage) advise.
  OutputFile(const std::filesystem::path& path, Mode mode, std::string cure = kRoomCure);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Reserves the bytes, so that a full disk is noticed before anything is written.
  void reserve(std::uint64_t size);
  void write(std::uint64_t offset, std::string_view bytes);
  /// Sets the disk to work on these bytes, where the system can do that, and returns at once.
  void begin_sync(std::uint64_t offset, std::uint64_t size);
  /// Returns when the bytes are on the disk.
  void sync();
  /// False where another process holds the lock, which ends with this object or its process. Where
  /// the file system has no locks it warns, and no other process is kept out.
  bool lock();
  /// Whether the file still has the name under which it was opened.
  bool has_its_name() const;
  /// Takes the first `size` bytes, which an earlier run wrote, into the sums.
  void go_on_after(std::uint64_t size);
  /// Sums of the bytes that were given to `write`, as they were in memory.
  const BlockSums& sums() const { return sums_; }
  /// The same of those since the last call, for a file that has several writers.
  BlockSums take_sums() { return std::exchange(sums_, {}); }

 private:
  std::filesystem::path path_;
  std::string cure_;
  int descriptor_;
  BlockSums sums_;
};

/// Throws Error (storage): what cannot be written is never damage, the disk or its rights are in
/// the way.
[[noreturn]] void fail_to(const char* what, const std::filesystem::path& path, int code,
                          const std::string& cure = kRoomCure);

}  // namespace moesh::formats
