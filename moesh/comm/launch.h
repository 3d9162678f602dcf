#pragma once
// Starts the ranks of a world. Without a launcher they are threads of this process; under mpirun or srun the world is MPI's.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>

#include "moesh/comm/group.h"

namespace moesh::comm {

struct LaunchOptions {
  std::chrono::milliseconds timeout{300'000};  // of every wait
  bool checked = false;                        // wrap every group: compare calls, and hashes of R and I values
  int num_threads = 0;                         // ATen threads of each rank; 0: the cores divided by the ranks, at least 1
  at::Device device = at::kCPU;                // several ranks may share one CUDA device

  void validate() const;
};

/// Runs `f` once per rank and returns when all have ended. If a rank throws, all others are stopped and the first exception
/// comes out of here, with its text. Under MPI the ranks are spread evenly over the processes, num_ranks must be a multiple
/// of their number, and 0 means one rank a process.
void launch(int num_ranks, const std::function<void(Group& world)>& f, const LaunchOptions& options = {});

/// The number of processes that mpirun or srun started with this one; 0 without a launcher.
int num_launched_processes();

/// What every rank thread does first: backward runs in this very thread, ATen uses `num_threads`, log lines carry the rank.
void prepare_rank_thread(int rank, const LaunchOptions& options, int num_local_ranks);

}  // namespace moesh::comm
