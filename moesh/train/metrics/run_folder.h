#pragma once
// The folder of a run, and the files in it that grow with each step.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "moesh/config/config.h"

namespace moesh::train {

// A file of metrics: what is written is there before the next step begins, and a full disk does not
// stop a run.

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

// The folder of a run, metrics.folder:
//   metrics.jsonl   a line for each step           config.toml    what the run was asked to do
//   starts.jsonl    a line for each start: when, where, with which versions, mesh and configuration
//   metrics.csv, tensorboard/                      where they are asked for
//   trace-steps-10-12.json                         of the steps that profile.steps names
//   replaced.jsonl  lines of steps that a run took once more, from a checkpoint
//   earlier/0001/   the same of the run that was here before

inline double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// The facts of a run before its first step.
struct RunFacts {
  std::int64_t first_step = 0;  // taken before, by the run that saved the checkpoint
  int num_ranks = 1;
  std::int64_t num_parameters = 0, num_active_parameters = 0;
  std::optional<std::int64_t> num_trained_parameters = {};  // where some are frozen
  double flops_per_token = 0;
  double peak_tflops = 0;  // of all devices; 0: unknown
  /// The estimated peak memory of a rank in bytes, if it was estimated.
  std::optional<std::int64_t> estimated_memory = {};
  /// On the CPU, where the memory of the process is measured: its memory before the model.
  std::optional<double> memory_before_gib = {};
};

void move_file(const std::filesystem::path& from, const std::filesystem::path& to);
/// Gives a file another text: at every moment it has the old one or all of the new one.
void replace_file(const std::filesystem::path& file, const std::string& text);

/// metrics.jsonl of the folder, for lines at its end and for no other run: throws Error (config)
/// where one is writing there, and Error (storage) if writing is impossible. A run that goes on
/// from a checkpoint keeps the lines of the first `first_step` steps. One that begins finds the
/// folder empty: what was there goes to earlier/. At every moment all lines are in one of the
/// files.
AppendFile open_run_folder(const std::filesystem::path& folder, std::int64_t first_step);

/// Notes the start of a run in the open folder.
void describe_start(const config::Config& config, const RunFacts& facts);

}  // namespace moesh::train
