#pragma once
// The trace of the steps that profile.steps names.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "moesh/comm/group.h"
#include "moesh/config/config.h"
#include "moesh/train/timeline/costs.h"

namespace moesh::train {

/// Every rank has one, and makes the same calls. If no step is to be recorded, they do nothing.
class StepTrace {
 public:
  /// `first_step` is the number of steps before this run, taken by the run that saved the
  /// checkpoint.
  StepTrace(const config::Config& config, comm::Group& world, std::int64_t first_step);
  ~StepTrace();
  StepTrace(const StepTrace&) = delete;
  StepTrace& operator=(const StepTrace&) = delete;

  /// Around a step, which is counted from 1.
  void begin_step(std::int64_t step);
  void end_step();
  /// Call it after everything that belongs to the step, such as saving it. After the last step to
  /// be recorded, or when the run `ends`, rank 0 writes trace-steps-10-12.json into the run's
  /// folder.
  void after_step(std::int64_t step, bool ends);

  /// On rank 0, once the file is written: where it is, and what cost most.
  const std::string& summary() const { return summary_; }

 private:
  struct Recording;
  void write(std::int64_t last_step);

  const config::Config& config_;
  comm::Group& world_;
  std::optional<config::StepRange> steps_;  // that are still to come
  std::int64_t first_recorded_ = 0;
  std::unique_ptr<Recording> recording_;
  std::string summary_;
};

// The records of the ranks as a file that Perfetto (https://ui.perfetto.dev) and Chrome
// (chrome://tracing) open: Chrome's trace event format.

/// Each rank is a "process", with a track "host" (steps, sections, operators and collectives, each
/// within what it is part of), one for every stream of the device, and the collectives from call to
/// end, which may go on beside each other. `about` are texts about the run, for its "otherData".
std::string trace_json(const std::vector<RankRecord>& records,
                       const std::vector<std::vector<Wait>>& waits,
                       const std::vector<std::pair<std::string, std::string>>& about);

}  // namespace moesh::train
