#pragma once
// metrics.csv: a row a step, for spreadsheets.

#include <filesystem>
#include <vector>

#include "moesh/train/metrics/append_file.h"
#include "moesh/train/metrics/sink.h"

namespace moesh::train {

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

}  // namespace moesh::train
