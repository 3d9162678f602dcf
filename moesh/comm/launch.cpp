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
#include "moesh/comm/nccl/nccl_launch.h"
#include "moesh/comm/nccl/stream.h"
#include "moesh/comm/threads/thread_world.h"

namespace moesh::comm {

void LaunchOptions::validate() const {
  MOESH_CHECK(timeout.count() > 0, ErrorKind::config, "timeout is ", timeout.count(),
              " ms; it must be positive");
  MOESH_CHECK(num_threads >= 0, ErrorKind::config, "num_threads is ", num_threads,
              "; use 0 (choose for me) or more");
  MOESH_CHECK(backend != Backend::nccl || device.is_cuda(), ErrorKind::config,
              "backend nccl works on GPUs, and device is ", device,
              "; set device to cuda, or backend to host");
}

int num_launched_processes() {
  // Open MPI's mpirun, and srun with a PMI or PMIx plug-in.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
    if (const char* text = std::getenv(name)) return std::atoi(text);
  if (std::getenv("PMIX_RANK"))
    if (const char* text = std::getenv("SLURM_NTASKS")) return std::atoi(text);
  return 0;
}

int local_process() {
  // Open MPI's mpirun; srun; Hydra (MPICH, Intel).
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID"})
    if (const char* text = std::getenv(name)) return std::atoi(text);
  return 0;
}

at::Device device_for(at::Device asked, int place) {
  if (asked.is_cpu() || asked.has_index()) return existing_device(asked);
  const int count = c10::impl::hasDeviceGuardImpl(asked.type())
                        ? c10::impl::VirtualGuardImpl(asked.type()).deviceCount()
                        : 0;
  return existing_device(
      count ? at::Device(asked.type(), static_cast<c10::DeviceIndex>(place % count)) : asked);
}

void use_device(at::Device device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.setDevice(device);
  guard.exchangeStream(guard.getNewStream(device));
}

void prepare_rank_thread(int rank, const LaunchOptions& options, int num_local_ranks) {
  set_log_rank(rank);
  // Ranks on one GPU would also have its one backward thread in common, and the first collective
  // in backward would hang.
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const char* asked =
      std::getenv("OMP_NUM_THREADS");  // what the user says counts, also where it is not the best
  const int num_threads = options.num_threads ? options.num_threads
                          : asked             ? std::atoi(asked)
                                              : cores / num_local_ranks;
  at::set_num_threads(std::max(1, num_threads));
  use_device(device_for(options.device, local_process()));
}

void run_rank_threads(const LocalRanks& ranks, const std::function<void(Group& world)>& f,
                      const LaunchOptions& options) {
  auto run = [&](int rank) {
    std::exception_ptr fault;
    try {
      prepare_rank_thread(rank, options, ranks.num_on_machine);
      std::shared_ptr<Group> group = ranks.group(rank);
      if (options.checked) group = checked(group);
      f(*group);
    } catch (...) {
      fault = std::current_exception();
    }
    ranks.leave(rank, fault);
    if (fault && options.after_fault) options.after_fault(rank, fault);
  };
  std::vector<std::thread> threads;
  const int end = ranks.first + ranks.count;
  for (int r = ranks.first; r < end; ++r) try {
      threads.emplace_back(run, r);
    } catch (const std::exception& e) {
      // Those that run already wait for the others: they are told that none will come.
      const auto fault = std::make_exception_ptr(Error(
          ErrorKind::config,
          detail::concat("of ", ranks.count, " ranks in this process, only ", r - ranks.first,
                         " got a thread: ", e.what(),
                         "; take fewer ranks, or raise the limits of the system (ulimit -u, -v)")));
      for (; r < end; ++r) ranks.leave(r, fault);
    }
  for (auto& t : threads) t.join();
}

void launch(int num_ranks, const std::function<void(Group& world)>& f,
            const LaunchOptions& options) {
  options.validate();
  if (should_try_nccl(num_ranks, options)) {
    LaunchOptions host = options;  // its ranks exchange NCCL's ids, and no more
    host.backend = Backend::host;
    host.device = at::kCPU;
    host.checked = false;
    return launch(num_ranks, on_nccl(f, options), host);
  }
  if (num_launched_processes() > 0) return launch_mpi(num_ranks, f, options);
  MOESH_CHECK(num_ranks >= 1, ErrorKind::config, "launch of ", num_ranks,
              " ranks; without mpirun it takes 1 or more");

  auto world = ThreadWorld::create(num_ranks, options.timeout);
  run_rank_threads(
      {.first = 0,
       .count = num_ranks,
       .num_on_machine = num_ranks,
       .group = [&](int rank) { return world->group(rank); },
       .leave = [&](int rank, std::exception_ptr fault) { world->leave(rank, fault); }},
      f, options);
  if (auto fault = world->roll().first_exception()) std::rethrow_exception(fault);
}

}  // namespace moesh::comm
