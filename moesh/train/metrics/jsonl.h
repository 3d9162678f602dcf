#pragma once
// metrics.jsonl: one JSON object a step, for programs.

#include <filesystem>

#include "moesh/formats/json.h"
#include "moesh/train/metrics/append_file.h"
#include "moesh/train/metrics/sink.h"

namespace moesh::train {

/// The record as a line of the file has it.
formats::JsonObject to_json(const StepRecord& record);

class JsonlSink final : public MetricSink {
 public:
  /// Writes folder/metrics.jsonl: see open_run_folder for what becomes of one that is there.
  JsonlSink(const std::filesystem::path& folder, std::int64_t first_step);

  /// Each line is in the file before the next step begins, for whoever follows the run. A line that
  /// cannot be written is reported at once, and the run goes on.
  void write(const StepRecord& record) override;
  void finish() override { file_.finish(); }

 private:
  AppendFile file_;
};

}  // namespace moesh::train
