#pragma once
// A file of metrics: what is written is there before the next step begins, and a full disk does not
// stop a run.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace moesh::train {

class AppendFile {
 public:
  AppendFile() = default;
  /// Opens it, or creates it; throws Error (storage) where that cannot be.
  explicit AppendFile(const std::filesystem::path& path);
  ~AppendFile();
  AppendFile(AppendFile&& other) noexcept;
  AppendFile& operator=(AppendFile&& other) noexcept;

  /// False where other runs hold it; free when this object or the process ends. A file system
  /// without locks gives no such protection.
  bool lock();
  /// Whether the open file is still the one that has the name.
  bool has_name() const;
  /// At the end of the file. False where it cannot be: the first time that is logged with the step,
  /// as is at the end how many were lost. Part of the bytes may be there.
  bool write(std::string_view bytes, std::int64_t step);
  /// The same, of a whole line: one that could not be written to its end gets one.
  void write_line(const std::string& line, std::int64_t step);
  /// Says how many records were lost, if any were.
  void finish();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int file_ = -1;
  std::int64_t num_lost_ = 0;
  bool is_cut_off_ = false;  // the last line in the file has no end
};

}  // namespace moesh::train
