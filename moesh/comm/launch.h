#pragma once
// Starts the ranks of a world. Without a launcher they are threads of this process; under mpirun or
// srun the world is MPI's.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "moesh/comm/group.h"
#include "moesh/comm/paced.h"

namespace moesh::comm {

// The launcher of this process, and the number of processes: read from the environment, which each
// launcher fills in its own way.

/// The value of a variable of the environment, or nothing.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;

struct Launcher {
  enum class Kind {
    none,  // one process
    mpi,   // mpirun, or srun with a PMI or PMIx plug-in: MPI starts the world
    torchrun,
    srun,  // without PMI
  };
  Kind kind = Kind::none;
  int num_processes = 0;   // 0: none was launched
  int rank = 0;            // of this process; MPI tells its own
  int place = 0;           // among the processes of this machine
  int num_on_machine = 1;  // processes; MPI's launchers that do not tell: all
  std::string address;     // of the machine of process 0, without MPI
  int port = 0;

  /// Processes without MPI, which meet over TCP.
  bool is_without_mpi() const { return kind == Kind::torchrun || kind == Kind::srun; }
  /// "torchrun"
  const char* name() const;
};

/// Throws Error (config) where a launcher without MPI has left a variable empty, or with a value
/// that cannot be.
Launcher find_launcher(const Environment& environment);
/// The launcher of this process.
Launcher find_launcher();

/// The warning for a user whose ranks are threads on one of several GPUs; empty if there is
/// nothing to tell.
std::string unused_gpus(int num_ranks, int num_gpus);

/// The first name of a list of Slurm's: "node[07-09,12],login" -> "node07".
std::string first_node(const std::string& list);

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
  std::optional<Links> links = {};  // exchanges take at least as long as on these
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

/// A world of MPI processes, each with one or more rank threads: runs f on those of num_ranks ranks
/// that belong to this process (0: one a process). The same call is made by every process.
/// mpi/no_mpi.cpp stands in where moesh was built without MPI.
void launch_mpi(int num_ranks, const std::function<void(Group& world)>& f,
                const LaunchOptions& options);

/// A group whose other ranks are not there: one rank of a world of any size runs by itself, to see
/// what it would hold and send. Results have their true shapes and no meaning: zeros, and where
/// values on the host are gathered, what this rank itself has, as if all had the same.
std::shared_ptr<Group> fake_group(const std::string& name, int rank,
                                  const std::vector<int>& members);

/// The number of processes that mpirun or srun started with this one; 0 without a launcher.
int num_launched_processes();

/// How many of a world's ranks the launcher has put on this machine, which holds for the others
/// if it puts equally many on each; 0 without a launcher.
int launched_ranks_per_node(int num_ranks);

/// The place of this process among those which the launcher started on this machine; 0 without a
/// launcher.
int local_process();

/// The device of the rank at `place` on its machine: where no index is given, GPUs are dealt out in
/// turn.
at::Device device_for(at::Device asked, int place);

/// Makes the device and a new stream of it the current ones of this thread.
void use_device(at::Device device);

/// Every rank thread begins with this: backward runs in this very thread, ATen uses `num_threads`,
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
