#pragma once
// Starts the ranks of a world. Without a launcher they are threads of this process; under mpirun or
// srun the world is MPI's.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

#include "moesh/comm/group.h"

namespace moesh::comm {

enum class Backend : std::uint8_t {
  automatic,  // nccl under mpirun or srun where every rank is a process with its own GPU, else
              // host
  host,       // threads, and MPI between processes: several ranks may use one GPU
  nccl,       // one GPU a rank
};

struct LaunchOptions {
  std::chrono::milliseconds timeout{300'000};  // of every wait
  bool checked = false;  // wrap every group: compare calls, and hashes of R and I values
  int num_threads =
      0;  // ATen threads of each rank; 0: OMP_NUM_THREADS, or the cores divided by the ranks
  at::Device device =
      at::kCPU;  // cuda without index: by place on the machine where each rank has its own GPU
  Backend backend = Backend::automatic;
  // Called on the thread of a rank that threw, when the others know of it already: for what takes
  // time, such as writing files.
  std::function<void(int rank, const std::exception_ptr& fault)> after_fault = {};

  void validate() const;
};

/// Runs `f` once per rank and returns when all have ended. If a rank throws, all others are stopped
/// and the first exception comes out of here, with its text. Under MPI the ranks are spread evenly
/// over the processes, num_ranks must be a multiple of their number, and 0 means one rank a
/// process.
void launch(int num_ranks, const std::function<void(Group& world)>& f,
            const LaunchOptions& options = {});

/// The number of processes that mpirun or srun started with this one; 0 without a launcher.
int num_launched_processes();

/// The place of this process among those which the launcher started on this machine; 0 without a
/// launcher.
int local_process();

/// The device of the rank at `place` on its machine: where no index is given, GPUs are dealt out in
/// turn.
at::Device device_for(at::Device asked, int place);

/// Makes the device and a new stream of it the current ones of this thread.
void use_device(at::Device device);

/// What every rank thread does first: backward runs in this very thread, ATen uses `num_threads`,
/// log lines carry the rank.
void prepare_rank_thread(int rank, const LaunchOptions& options, int num_local_ranks);

/// A rank's share of the cores of its machine, at least one: of the ranks that this process
/// launched last, on whatever thread it is asked.
int cores_of_rank();

/// The ranks of a world that live in this process.
struct LocalRanks {
  int first = 0, count = 1;
  int num_on_machine = 1;                                   // on which its cores are divided
  std::function<std::shared_ptr<Group>(int rank)> group;    // the world as a rank sees it
  std::function<void(int rank, std::exception_ptr)> leave;  // told when it returned (null) or threw
};

/// Runs `f` on a thread for each of them, and returns when all have ended.
void run_rank_threads(const LocalRanks& ranks, const std::function<void(Group& world)>& f,
                      const LaunchOptions& options);

}  // namespace moesh::comm
