#pragma once
// Files that are written by several ranks at once, with errors that name the file, what failed and
// why.

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace moesh::checkpoint {

class OutputFile {
 public:
  enum class Mode { create, open };
  OutputFile(const std::filesystem::path& path, Mode mode);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Reserves the bytes, so that a full disk is noticed before anything is written.
  void reserve(std::uint64_t size);
  void write(std::uint64_t offset, std::string_view bytes);
  /// Returns when the bytes are on the disk.
  void sync();

 private:
  [[noreturn]] void fail(const char* what, int code) const;
  std::filesystem::path path_;
  int descriptor_;
};

/// Writes a small file, which is on the disk when this returns.
void write_file(const std::filesystem::path& path, std::string_view bytes);
/// Returns when the names in a folder are on the disk.
void sync_folder(const std::filesystem::path& path);
void make_folder(const std::filesystem::path& path);
void rename_folder(const std::filesystem::path& from, const std::filesystem::path& to);
/// Both exist, and swap names in one step; false where the file system cannot do that.
bool exchange_folders(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace moesh::checkpoint
