#pragma once
// Lines that people read while a run goes on.

#include <cstdio>

#include "moesh/train/metrics/sink.h"

namespace moesh::train {

struct ConsoleOptions {
  std::int64_t num_steps = 0;  // of the run
  std::int64_t log_freq = 1;   // steps from one line to the next
  bool is_terminal = false;    // between the lines a progress line, which the next one overwrites
};

/// A line for the first step, every log_freq-th, the last, and each that was skipped.
class ConsoleSink final : public MetricSink {
 public:
  explicit ConsoleSink(const ConsoleOptions& options, std::FILE* out = stdout);
  ~ConsoleSink() override;

  void write(const StepRecord& record) override;
  void finish() override { clear_progress(); }

 private:
  void clear_progress();

  ConsoleOptions options_;
  std::FILE* out_;
  bool has_progress_ = false;
};

}  // namespace moesh::train
