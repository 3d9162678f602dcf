#pragma once
// metrics.jsonl: one JSON object a step, for programs.

#include <filesystem>
#include <string>

#include "moesh/train/metrics/sink.h"

namespace moesh::train {

class JsonlSink final : public MetricSink {
 public:
  /// Writes folder/metrics.jsonl, and makes the folder if it is missing. A run that goes on from a
  /// checkpoint adds its lines to those of the first `first_step` steps; any others are replaced.
  /// At every moment the file has the lines that are kept.
  JsonlSink(const std::filesystem::path& folder, std::int64_t first_step);
  ~JsonlSink() override;

  /// Each line is in the file before the next step begins, for whoever follows the run. A line that
  /// cannot be written is reported at once, and the run goes on.
  void write(const StepRecord& record) override;
  void finish() override;

 private:
  std::filesystem::path path_;
  int file_ = -1;
  std::int64_t num_lost_ = 0;  // lines
  bool is_cut_off_ = false;    // the last line in the file has no end
};

}  // namespace moesh::train
