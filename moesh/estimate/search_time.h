#pragma once
// The meshes on which a cluster trains a model fastest.

#include <functional>

#include "moesh/estimate/step_time.h"

namespace moesh::estimate {

struct TimeSearch {
  std::vector<StepTime> best;  // the fastest first
  int num_meshes = 0;          // that the model divides by
  int num_timed = 0;           // the others cannot be among the best
  int num_runs = 0;            // dry runs of a few layers
};

/// Called now and then with the ways to split a layer that are done, and all of them.
using Progress = std::function<void(int num_done, int num_all, const TimeSearch& so_far)>;

/// Of the meshes of all GPUs of the cluster on which a rank needs no more than `limit` bytes, the
/// `most` with the most tokens a second. Degrees of `asked` that are not 1 stay as they are; etp is
/// 1 or tp where it is not set.
TimeSearch search_time(Profiler& profiler, const Cluster& cluster, const MeshShape& asked,
                       const PipelineOptions& options, double limit, size_t most,
                       const Progress& progress);

}  // namespace moesh::estimate
