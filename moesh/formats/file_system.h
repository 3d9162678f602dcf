#pragma once
// The calls of the operating system that moesh makes on files. Everything that reads or writes a
// checkpoint or metrics goes through here, so that tests can put errors, lies and deaths in the
// place of a disk.

#include <sys/stat.h>
#include <sys/types.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace moesh::formats {

/// Each call returns what the system call does: -1 where it fails, with the reason in errno. This
/// one is the real file system.
class FileSystem {
 public:
  using Path = std::filesystem::path;
  virtual ~FileSystem() = default;

  virtual int open(const Path& path, int flags);
  virtual void close(int file);
  virtual ssize_t read(int file, void* to, std::size_t count, std::uint64_t offset);
  virtual ssize_t write(int file, const void* from, std::size_t count, std::uint64_t offset);
  /// At the end of a file that was opened with O_APPEND.
  virtual ssize_t append(int file, const void* from, std::size_t count);
  /// Room for `size` bytes.
  virtual int reserve(int file, std::uint64_t size);
  /// Returns when everything is on the disk.
  virtual int sync(int file);
  /// Sets the disk to work on what was written there, and returns at once: a hint.
  virtual int begin_sync(int file, std::uint64_t offset, std::uint64_t size);
  /// The next read comes from the disk and not from memory, if the system can do that.
  virtual int forget_cached(int file, std::uint64_t offset, std::uint64_t size);
  /// A lock of the open file: it ends with it, or with the process.
  virtual int lock(int file);

  virtual int status(const Path& path, struct stat& status);
  /// The status of an open file, whatever its name is by now.
  virtual int status(int file, struct stat& status);
  /// The status of a link, and not of what it points to.
  virtual int link_status(const Path& path, struct stat& status);
  virtual int list(const Path& folder, std::vector<std::string>& names);
  virtual int make_folder(const Path& path);
  /// A file, or an empty folder.
  virtual int remove(const Path& path);
  virtual int rename(const Path& from, const Path& to);
  /// Both exist, and swap names in one step.
  virtual int exchange(const Path& a, const Path& b);
  virtual int free_bytes(const Path& folder, std::uint64_t& bytes);
};

/// The one in use.
FileSystem& file_system();
/// For tests; null: the real one again.
void set_file_system(FileSystem* other);

/// Whether trying once more may help after this errno: network file systems and failing disks.
bool is_passing(int code);

/// Waits a little before try number `attempt`; false after the last one.
bool wait_for_retry(int attempt);

/// Calls f until it returns no negative value; only while the reason may pass, and not for long.
template <class F>
auto retried(const F& f) {
  for (int attempt = 1;; ++attempt) {
    const auto result = f();
    if (result >= 0 || !is_passing(errno) || !wait_for_retry(attempt)) return result;
  }
}

}  // namespace moesh::formats
