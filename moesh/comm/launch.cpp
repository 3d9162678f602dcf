#include "moesh/comm/launch.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/comm/nccl/nccl_group.h"
#include "moesh/comm/observers.h"
#include "moesh/comm/stream.h"
#include "moesh/comm/tcp/tcp_world.h"
#include "moesh/comm/threads/thread_world.h"

namespace moesh::comm {
namespace {

std::atomic<int> ranks_on_machine = 1;

int num_devices(at::DeviceType type) {
  return c10::impl::hasDeviceGuardImpl(type) ? c10::impl::VirtualGuardImpl(type).deviceCount() : 0;
}

}  // namespace

void LaunchOptions::validate() const {
  MOESH_CHECK(timeout.count() > 0, ErrorKind::config, "timeout is ", timeout.count(),
              " ms; it must be positive");
  MOESH_CHECK(num_threads >= 0, ErrorKind::config, "num_threads is ", num_threads,
              "; use 0 (choose for me) or more");
  MOESH_CHECK(backend != Backend::nccl || device.is_cuda(), ErrorKind::config,
              "backend nccl works on GPUs, and device is ", device,
              "; set device to cuda, or backend to host");
}

int num_launched_processes() { return find_launcher().num_processes; }

int launched_ranks_per_node(int num_ranks) {
  try {
    const Launcher l = find_launcher();
    return l.num_processes == 0 ? 0 : l.num_on_machine * std::max(1, num_ranks / l.num_processes);
  } catch (const Error&) {
    return 0;  // launch() says what is wrong with the environment
  }
}

int local_process() { return find_launcher().place; }

at::Device device_for(at::Device asked, int place) {
  if (asked.is_cpu() || asked.has_index()) return existing_device(asked);
  const int count = num_devices(asked.type());
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
  ranks_on_machine = num_local_ranks;
  const char* asked =
      std::getenv("OMP_NUM_THREADS");  // what the user says counts, also where it is not the best
  const int num_threads = options.num_threads ? options.num_threads
                          : asked             ? std::atoi(asked)
                                              : cores_of_rank();
  at::set_num_threads(std::max(1, num_threads));
  use_device(device_for(options.device, local_process()));
}

int cores_of_rank() {
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / ranks_on_machine);
}

void run_rank_threads(const LocalRanks& ranks, const std::function<void(Group& world)>& f,
                      const LaunchOptions& options) {
  std::optional<PacedWorld> paced;
  if (options.links) paced.emplace(*options.links, ranks.first, ranks.count);
  auto run = [&](int rank) {
    std::exception_ptr fault;
    try {
      std::optional<Pacer> pacer;
      if (paced) pacer.emplace(*paced);
      prepare_rank_thread(rank, options, ranks.num_on_machine);
      std::shared_ptr<Group> group = ranks.group(rank);
      if (options.checked) check_ranks(*group);
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

namespace {

// The ranks as threads, or as processes that exchange what is in the memory of the host.
void launch_on_host(const Launcher& launcher, int num_ranks,
                    const std::function<void(Group& world)>& f, const LaunchOptions& options) {
  if (launcher.is_without_mpi()) return launch_tcp(launcher, num_ranks, f, options);
  if (launcher.num_processes > 0) return launch_mpi(num_ranks, f, options);
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

}  // namespace

void launch(int num_ranks, const std::function<void(Group& world)>& f,
            const LaunchOptions& options) {
  options.validate();
  const Launcher launcher = find_launcher();
  MOESH_CHECK(!launcher.is_without_mpi() || options.device.is_cuda(), ErrorKind::config,
              launcher.name(), " has started ", launcher.num_processes,
              " processes, and training.device is cpu: without MPI, processes need a GPU each "
              "(--device=cuda). On CPUs start moesh without ",
              launcher.name(), ", and its ranks are threads, or with mpirun -n ",
              launcher.num_processes);
  LaunchOptions wanted = options;
  // Over TCP go the ids of NCCL, and what is small: never what a model computes.
  if (launcher.is_without_mpi()) wanted.backend = Backend::nccl;
  if (should_try_nccl(num_ranks, wanted)) {
    LaunchOptions host = wanted;  // its ranks exchange NCCL's ids, and no more
    host.backend = Backend::host;
    host.device = at::kCPU;
    host.checked = false;
    return launch_on_host(launcher, num_ranks, on_nccl(f, wanted), host);
  }
  if (launcher.num_processes == 0)
    if (const auto text = unused_gpus(
            num_ranks,
            options.device.is_cuda() && !options.device.has_index() ? num_devices(at::kCUDA) : 0);
        !text.empty())
      log_warn(text);
  launch_on_host(launcher, num_ranks, f, options);
}

}  // namespace moesh::comm
