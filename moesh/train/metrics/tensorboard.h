#pragma once
// tensorboard/events.out.tfevents.*: what TensorBoard reads.

#include <filesystem>

#include "moesh/train/metrics/append_file.h"
#include "moesh/train/metrics/sink.h"

namespace moesh::train {

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

}  // namespace moesh::train
