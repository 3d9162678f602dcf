#pragma once
// Where the records of a run go. A sink is a class, and a line in open_sinks.

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/config/config.h"
#include "moesh/formats/json.h"
#include "moesh/train/metrics/record.h"
#include "moesh/train/metrics/run_folder.h"

namespace moesh::train {

/// Only rank 0 has sinks.
class MetricSink {
 public:
  MetricSink() = default;
  virtual ~MetricSink() = default;
  MetricSink(const MetricSink&) = delete;
  MetricSink& operator=(const MetricSink&) = delete;

  /// One call a step, in order.
  virtual void write(const StepRecord& record) = 0;
  /// After the last step.
  virtual void finish() = 0;
};

using MetricSinks = std::vector<std::unique_ptr<MetricSink>>;

/// The sinks that a configuration asks for.
MetricSinks open_sinks(const config::Config& config, const RunFacts& facts);

// Lines that people read while a run goes on.

struct ConsoleOptions {
  std::int64_t num_steps = 0;   // of the run
  std::int64_t first_step = 0;  // taken before this start
  std::int64_t log_freq = 1;    // steps from one line to the next
  bool is_terminal = false;     // between the lines a progress line, which the next one overwrites
  bool has_colors = false;
  int columns = 100;  // a line has the fields that fit
};
/// For standard output, as it is: a terminal of some width (NO_COLOR: without colours), or not.
ConsoleOptions console_options(const config::Config& config, std::int64_t first_step);

/// A line for the first step, every log_freq-th, the last, and each that was skipped.
class ConsoleSink final : public MetricSink {
 public:
  explicit ConsoleSink(const ConsoleOptions& options, std::FILE* out = stdout);
  ~ConsoleSink() override;

  void write(const StepRecord& record) override;
  void finish() override;

 private:
  std::string line_of(const StepRecord& record) const;
  std::string progress_of(const StepRecord& record);

  ConsoleOptions options_;
  std::FILE* out_;
  double mean_seconds_ = 0;  // of a step, with all that is between steps; the last ones count most
  double last_time_ = 0;     // when the step before ended
};

/// The first lines of a run: model, mesh in both views, data, batch, memory.
std::string run_header(const config::Config& config, const RunFacts& facts,
                       const std::string& data);

// metrics.csv: a row a step, for spreadsheets.

class CsvSink final : public MetricSink {
 public:
  /// Writes folder/metrics.csv, with a column for each of the validation sets. A run that goes on
  /// from a checkpoint keeps the rows of the first `first_step` steps, unless the columns are
  /// others: then the old file stays as metrics-until-step-N.csv.
  CsvSink(const std::filesystem::path& folder, std::int64_t first_step,
          std::vector<std::string> validation_names);

  void write(const StepRecord& record) override;
  void finish() override { file_.finish(); }

 private:
  std::vector<std::string> validation_names_;
  AppendFile file_;
};

// metrics.jsonl: one JSON object a step, for programs.

/// The record as a line of the file has it.
formats::JsonObject to_json(const StepRecord& record);

class JsonlSink final : public MetricSink {
 public:
  /// Writes folder/metrics.jsonl. open_run_folder says what happens to an existing one.
  JsonlSink(const std::filesystem::path& folder, std::int64_t first_step);

  /// Each line is in the file before the next step begins, for programs that follow the run. A line
  /// that cannot be written is reported at once, and the run goes on.
  void write(const StepRecord& record) override;
  void finish() override { file_.finish(); }

 private:
  AppendFile file_;
};

// tensorboard/events.out.tfevents.*: what TensorBoard reads.

class TensorBoardSink final : public MetricSink {
 public:
  /// Writes a new file in folder/tensorboard. Of a run that goes on from a checkpoint TensorBoard
  /// drops what older files have of the steps after `first_step`.
  TensorBoardSink(const std::filesystem::path& folder, std::int64_t first_step);

  void write(const StepRecord& record) override;
  void finish() override { file_.finish(); }

 private:
  void begin(double time, std::int64_t first_step);

  std::filesystem::path folder_;
  AppendFile file_;
  int num_files_ = 0;
  bool is_broken_ = false;  // the last record is not whole, and readers would stop at it
};

// TensorBoard's event files: records of a length, the data, and a checksum of each; the data is an
// Event message of tensorflow's event.proto, which is written here by hand.
namespace event_file {

/// CRC-32C (Castagnoli) of the bytes.
std::uint32_t crc32c(std::string_view bytes);
/// The checksum as the files have it: rotated, with a constant added.
std::uint32_t masked(std::uint32_t crc);

/// One record around the data.
std::string record(std::string_view data);

/// The first event of a file.
std::string version_event(double time);
/// Tells readers that events of this step and later ones, in older files, are of a run that was
/// taken up from before it.
std::string restart_event(double time, std::int64_t step);
std::string scalars_event(double time, std::int64_t step, const Scalars& scalars);

}  // namespace event_file

}  // namespace moesh::train
