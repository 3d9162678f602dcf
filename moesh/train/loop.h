#pragma once
// The training run: the ranks of the mesh, console lines, metrics in the run folder.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "moesh/config/config.h"
#include "moesh/train/build.h"
#include "moesh/train/metrics/record.h"

namespace moesh::train {

/// The outcome of a run.
struct RunSummary {
  std::int64_t num_steps = 0;     // that were run
  std::int64_t first_step = 0;    // taken before, by the run that saved the checkpoint
  std::vector<double> losses;     // cross-entropy per token of every step
  std::optional<double> entropy;  // the floor of the loss, where the data knows it
  double first_step_seconds = 0;  // from the start to the end of the first step
  double step_seconds = 0;        // median of the later ones
  bool interrupted = false;
  std::string folder;  // where metrics.jsonl is
  std::string trace;   // of profile.steps: where it is, and what cost most
};

/// Facts from the caller for the header and folder of the run, and its callbacks.
struct CallerInfo {
  std::optional<std::int64_t> estimated_memory = {};  // bytes of a rank at its peak
  std::optional<double> memory_before_gib = {};       // of the process, before there is a model
  /// Called after each step on the thread of rank 0, which goes on when it returns.
  std::function<void(const StepRecord& record)> on_step = {};
};

/// Trains. Without a launcher the ranks are threads of this process; under mpirun or srun they are
/// spread over the processes. SIGINT, SIGTERM and training.max_minutes end the run after the step,
/// which is saved where checkpoints are; what the caller had set for these signals counts again
/// afterwards.
RunSummary train(const Config& config, const CallerInfo& caller = {});
/// The same on data of the caller's own, whose ranks in threads read from it at the same time. A
/// run that goes on from a checkpoint goes on at its sample: `describe()` tells other data from
/// this.
RunSummary train(const Config& config, const data::Dataset& dataset, const CallerInfo& caller = {});

}  // namespace moesh::train
