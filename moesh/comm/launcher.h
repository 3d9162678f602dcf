#pragma once
// Who started this process, and with how many others: read from the environment, which each
// launcher fills in its own way.

#include <functional>
#include <optional>
#include <string>

namespace moesh::comm {

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
  int num_processes = 0;  // 0: none was launched
  int rank = 0;           // of this process; MPI tells its own
  int place = 0;          // among the processes of this machine
  int num_on_machine = 1;
  std::string address;  // of the machine of process 0, without MPI
  int port = 0;

  /// Processes without MPI, which meet over TCP.
  bool is_without_mpi() const { return kind == Kind::torchrun || kind == Kind::srun; }
  /// "torchrun"
  const char* name() const;
};

/// Throws Error (config) where a launcher without MPI has left a variable empty, or with a value
/// that cannot be.
Launcher find_launcher(const Environment& environment);
/// Of this process.
Launcher find_launcher();

/// What to tell whose ranks are threads, and share one of several GPUs; empty where there is
/// nothing to tell.
std::string unused_gpus(int num_ranks, int num_gpus);

/// The first name of a list of Slurm's: "node[07-09,12],login" -> "node07".
std::string first_node(const std::string& list);

}  // namespace moesh::comm
