#pragma once
// Lines that people read while a run goes on.

#include <cstdio>
#include <string>

#include "moesh/train/metrics/sink.h"

namespace moesh::train {

struct ConsoleOptions {
  std::int64_t num_steps = 0;   // of the run
  std::int64_t first_step = 0;  // taken before this start
  std::int64_t log_freq = 1;    // steps from one line to the next
  bool is_terminal = false;     // between the lines a progress line, which the next one overwrites
  bool has_colors = false;
  int columns = 100;  // a line has as many fields as fit
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

/// What is about to happen: model, mesh in both views, data, batch, memory.
std::string run_header(const config::Config& config, const RunFacts& facts,
                       const std::string& data);

}  // namespace moesh::train
