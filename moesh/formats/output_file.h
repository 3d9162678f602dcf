#pragma once
// Files that are written by range, with errors that name the file, what failed and why.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "moesh/formats/checksum.h"

namespace moesh::formats {

class OutputFile {
 public:
  enum class Mode { create, open };
  /// `cure` is what errors (storage) advise.
  OutputFile(const std::filesystem::path& path, Mode mode, std::string cure);
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
  /// the file system has no locks it warns, and nobody is kept out.
  bool lock();
  /// Whether the file still has the name under which it was opened.
  bool has_its_name() const;
  /// Takes the first `size` bytes, which an earlier run wrote, into the sums.
  void go_on_after(std::uint64_t size);
  /// Of the bytes that were given to `write`, as they were in memory.
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
                          const std::string& cure);

}  // namespace moesh::formats
