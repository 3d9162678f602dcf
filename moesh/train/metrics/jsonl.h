#pragma once
// metrics.jsonl: one JSON object a step, for programs.

#include <filesystem>
#include <fstream>

#include "moesh/train/metrics/sink.h"

namespace moesh::train {

class JsonlSink final : public MetricSink {
 public:
  /// Writes folder/metrics.jsonl, and makes the folder if it is missing. A run that goes on from a
  /// checkpoint adds its lines to those of the first `first_step` steps; any others are replaced.
  JsonlSink(const std::filesystem::path& folder, std::int64_t first_step);

  /// Each line is on disk before the next step begins, for whoever follows the run.
  void write(const StepRecord& record) override;
  void finish() override { file_.close(); }

 private:
  std::ofstream file_;
};

}  // namespace moesh::train
