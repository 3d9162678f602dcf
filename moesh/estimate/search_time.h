#pragma once
// How a cluster trains a model fastest: the mesh, and with it the schedule of a pipeline, what is
// recomputed in backward, and how many sequences a micro-batch has.

#include <functional>

#include "moesh/estimate/step_time.h"

namespace moesh::estimate {

struct TimeSearch {
  std::vector<StepTime> best;  // the fastest first
  std::vector<int> num_alike;  // of each: how many were found within a per cent, itself included
  int num_meshes = 0;          // that the model divides by
  int num_timed = 0;           // steps; the others cannot be among the best
  int num_runs = 0;            // dry runs of a few layers
};

/// Called now and then with the ways to split a layer that are done, and all of them.
using Progress = std::function<void(int num_done, int num_all, const TimeSearch& so_far)>;

/// The configuration with what a search needs where nobody has set it: the dtype and the device of
/// a cluster, a sequence length and the sequences of a step. `chosen` gets their names.
Config with_sensible_sizes(const Config& config, const Cluster& cluster,
                           std::vector<std::string>& chosen);

/// The step on the mesh of the configuration in each way in which rows may travel: with every
/// dispatcher that differs there, behind the work of another micro-batch and not. What is set is
/// kept; the fastest first.
std::vector<StepTime> ways_to_travel(const Config& config, const Cluster& cluster);

/// The options that a search tries where nobody has set them, and what it has found for each.
std::vector<std::pair<std::string, std::string>> searched_options(const Config& config,
                                                                  const StepTime& found);

/// All GPUs of the cluster, and no more than `limit` bytes on a rank: the `most` different speeds,
/// each with the simplest mesh of those within a per cent of it. Degrees that are not 1 stay as
/// they are, as do options that are set; etp is 1 or tp where it is not set, tp stays within a
/// node, and cp leaves a thousand tokens to a rank. Recompute is tried where a step does not fit
/// without it, larger micro-batches while they are
/// faster.
TimeSearch search_time(const Config& config, const Cluster& cluster, double limit, size_t most,
                       const Progress& progress);

}  // namespace moesh::estimate
