#include "moesh/comm/launch.h"

#include <ATen/Parallel.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdlib>
#include <thread>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/comm/checked/checked_group.h"
#include "moesh/comm/mpi/mpi_world.h"
#include "moesh/comm/threads/thread_world.h"

namespace moesh::comm {

void LaunchOptions::validate() const {
  MOESH_CHECK(timeout.count() > 0, ErrorKind::config, "timeout is ", timeout.count(), " ms; it must be positive");
  MOESH_CHECK(num_threads >= 0, ErrorKind::config, "num_threads is ", num_threads, "; use 0 (choose for me) or more");
}

int num_launched_processes() {
  // Open MPI's mpirun, and srun with a PMI or PMIx plug-in.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
    if (const char* text = std::getenv(name)) return std::atoi(text);
  if (std::getenv("PMIX_RANK"))
    if (const char* text = std::getenv("SLURM_NTASKS")) return std::atoi(text);
  return 0;
}

void prepare_rank_thread(int rank, const LaunchOptions& options, int num_local_ranks) {
  set_log_rank(rank);
  // Ranks that share a GPU would otherwise share its one backward thread, and the first collective in backward would hang.
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  at::set_num_threads(options.num_threads ? options.num_threads : std::max(1, cores / num_local_ranks));
  if (!options.device.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(options.device.type());
    guard.setDevice(options.device);
    guard.exchangeStream(guard.getNewStream(options.device));
  }
}

void launch(int num_ranks, const std::function<void(Group& world)>& f, const LaunchOptions& options) {
  options.validate();
  if (num_launched_processes() > 0) return launch_mpi(num_ranks, f, options);
  MOESH_CHECK(num_ranks >= 1, ErrorKind::config, "launch of ", num_ranks, " ranks; without mpirun it takes 1 or more");

  auto world = ThreadWorld::create(num_ranks, options.timeout);
  auto run_rank = [&](int rank) {
    std::exception_ptr fault;
    try {
      prepare_rank_thread(rank, options, num_ranks);
      std::shared_ptr<Group> group = world->group(rank);
      if (options.checked) group = checked(group);
      f(*group);
    } catch (...) {
      fault = std::current_exception();
    }
    world->leave(rank, fault);
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < num_ranks; ++r) threads.emplace_back(run_rank, r);
  for (auto& t : threads) t.join();
  if (auto fault = world->first_fault()) std::rethrow_exception(fault);
}

}  // namespace moesh::comm
