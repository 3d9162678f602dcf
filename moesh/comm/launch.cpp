#include "moesh/comm/launch.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <charconv>
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

constexpr int kMaxProcesses = 1 << 20;
constexpr int kMaxPort = 65535;

class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  bool has(const char* name) const { return environment_(name).has_value(); }

  std::string text(const char* name) const {
    const auto value = environment_(name);
    MOESH_CHECK(value && !value->empty(), ErrorKind::config, name, " is ",
                value ? "empty" : "not set", "; the launcher, or its script, must set it");
    return *value;
  }
  int number(const char* name, int least, int most) const {
    const std::string value = text(name);
    int n = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), n);
    MOESH_CHECK(
        error == std::errc() && end == value.data() + value.size() && n >= least && n <= most,
        ErrorKind::config, name, " is '", value, "'; it must be a number from ", least, " to ",
        most);
    return n;
  }
  int number_or(const char* name, int least, int most, int otherwise) const {
    return has(name) ? number(name, least, most) : otherwise;
  }
  /// As MPI's launchers set it: always a number.
  int plain(const char* name) const { return std::atoi(text(name).c_str()); }

 private:
  const Environment& environment_;
};

int place_on_machine(const Variables& v) {
  // Open MPI's mpirun; srun; Hydra (MPICH, Intel).
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID"})
    if (v.has(name)) return v.plain(name);
  return 0;
}

int num_on_machine(const Variables& v, int num_processes) {
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"})
    if (v.has(name)) return std::max(1, v.plain(name));
  const int num_machines = v.has("SLURM_STEP_NUM_NODES") ? v.plain("SLURM_STEP_NUM_NODES") : 1;
  return (num_processes + num_machines - 1) / std::max(1, num_machines);
}

Launcher of_mpi(const Variables& v, const char* num_processes) {
  const int num = v.plain(num_processes);
  return {.kind = Launcher::Kind::mpi,
          .num_processes = num,
          .place = place_on_machine(v),
          .num_on_machine = num_on_machine(v, num)};
}

Launcher of_torchrun(const Variables& v) {
  Launcher l{.kind = Launcher::Kind::torchrun,
             .num_processes = v.number("WORLD_SIZE", 1, kMaxProcesses)};
  if (l.num_processes == 1) return l;  // no other process to meet
  l.rank = v.number("RANK", 0, l.num_processes - 1);
  l.place = v.number_or("LOCAL_RANK", 0, kMaxProcesses, 0);
  l.num_on_machine = v.number_or("LOCAL_WORLD_SIZE", 1, kMaxProcesses, 1);
  l.address = v.text("MASTER_ADDR");
  // MASTER_PORT itself is taken: torchrun listens on it.
  l.port = v.has("MOESH_PORT") ? v.number("MOESH_PORT", 1, kMaxPort)
                               : v.number("MASTER_PORT", 1, kMaxPort - 1) + 1;
  return l;
}

Launcher of_srun(const Variables& v) {
  Launcher l{.kind = Launcher::Kind::srun,
             .num_processes = v.number("SLURM_STEP_NUM_TASKS", 1, kMaxProcesses)};
  l.rank = v.number("SLURM_PROCID", 0, l.num_processes - 1);
  l.place = v.number_or("SLURM_LOCALID", 0, kMaxProcesses, 0);
  const int num_machines = v.number_or("SLURM_STEP_NUM_NODES", 1, kMaxProcesses, 1);
  l.num_on_machine = (l.num_processes + num_machines - 1) / num_machines;
  l.address = v.has("MASTER_ADDR")           ? v.text("MASTER_ADDR")
              : v.has("SLURM_STEP_NODELIST") ? first_node(v.text("SLURM_STEP_NODELIST"))
                                             : first_node(v.text("SLURM_JOB_NODELIST"));
  // Another one for each job, since jobs may share a machine.
  constexpr int kFirst = 20000, kCount = 10000;
  l.port = v.number_or("MOESH_PORT", 1, kMaxPort, 0);
  if (l.port == 0) l.port = kFirst + v.number_or("SLURM_JOB_ID", 0, 2147483647, 0) % kCount;
  return l;
}

}  // namespace

const char* Launcher::name() const {
  switch (kind) {
    case Kind::none: return "no launcher";
    case Kind::mpi: return "MPI's launcher";
    case Kind::torchrun: return "torchrun";
    case Kind::srun: return "srun";
  }
  return "unknown";
}

Launcher find_launcher(const Environment& environment) {
  const Variables v(environment);
  // Open MPI's mpirun, and srun with a PMI or PMIx plug-in.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
    if (v.has(name)) return of_mpi(v, name);
  if (v.has("PMIX_RANK") && v.has("SLURM_NTASKS")) return of_mpi(v, "SLURM_NTASKS");
  Launcher l{.place = place_on_machine(v)};
  if (v.has("RANK") && v.has("WORLD_SIZE") && v.has("MASTER_ADDR"))
    l = of_torchrun(v);
  else if (v.has("SLURM_PROCID") && v.has("SLURM_STEP_NUM_TASKS"))  // not set in a batch script
    l = of_srun(v);
  else if (v.has("WORLD_SIZE") || (v.has("RANK") && v.plain("RANK") > 0))
    l = of_torchrun(v);  // one process of several must not train by itself: it says what is missing
  // A single process has no other to meet: its ranks are threads.
  return l.num_processes == 1 ? Launcher{.place = l.place} : l;
}

Launcher find_launcher() {
  return find_launcher([](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value ? std::optional<std::string>(value) : std::nullopt;
  });
}

std::string unused_gpus(int num_ranks, int num_gpus) {
  if (num_ranks < 2 || num_gpus < 2) return "";
  return detail::concat(
      num_ranks, " ranks are threads of one process and share GPU 0 of ", num_gpus,
      ": they read each other's memory. To use the others, start one process for each GPU: "
      "torchrun --nproc-per-node ",
      num_ranks, " --no-python moesh ..., or mpirun -n ", num_ranks, " moesh ...");
}

std::string first_node(const std::string& list) {
  const auto bracket = list.find('['), comma = list.find(',');
  if (bracket == std::string::npos || comma < bracket) return list.substr(0, comma);
  const auto end = list.find_first_of(",-]", bracket);
  MOESH_CHECK(end != std::string::npos, ErrorKind::config, "'", list,
              "' is not a list of Slurm's nodes; set MASTER_ADDR to the machine of process 0");
  const auto close = list.find(']', end);
  const auto rest = close == std::string::npos ? close : list.find_first_of(",[", close);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1) +
         (close == std::string::npos ? "" : list.substr(close + 1, rest - close - 1));
}

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
