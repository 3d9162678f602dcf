// A fault in a world of MPI processes; mpi_faults.py reads its log.
//   mpirun -n 3 comm_mpi_faults <fault> num_ranks log     ends with that fault
//   mpirun -n 2 comm_mpi_faults bad_launches 0 log        calls of launch that are refused
//   mpirun -n 3 comm_mpi_faults recover num_ranks log     all faults in turn, each followed by a new world
// Besides those of faults.h: "stopped" and "killed" (rank 1 sends itself SIGSTOP or SIGKILL) and
// "exits" (it ends its process).

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <string>

#include "faults.h"
#include "moesh/base/error.h"
#include "moesh/comm/launch.h"

using namespace moesh::comm;

namespace {

int log_file = -1;

// One line, one write at the end of the file: those of several processes do not mix, as they do on
// mpirun's standard output.
void say(const std::string& line) {
  const std::string text = line + "\n";
  if (write(log_file, text.data(), text.size()) < 0) std::abort();
}

bool has_all(const std::string& text, const std::vector<std::string>& parts) {
  return std::all_of(parts.begin(), parts.end(),
                     [&](const auto& part) { return text.find(part) != std::string::npos; });
}

std::vector<faults::Fault> all_faults() {
  auto all = faults::all();
  const std::string late = "operation 2 of group 'world': rank 1 did not arrive within 1.5 s";
  all.push_back({.name = "stopped",
                 .rank_1 = [](Group&) { std::raise(SIGSTOP); },
                 .texts = {late},
                 .timeout = std::chrono::milliseconds(1500)});
  all.push_back({.name = "killed", .rank_1 = [](Group&) { std::raise(SIGKILL); }, .texts = {}});
  all.push_back({.name = "exits", .rank_1 = [](Group&) { std::_Exit(0); }, .texts = {}});
  return all;
}

void a_world_that_works(int num_ranks) {
  launch(num_ranks, [](Group& world) {
    const int n = world.size();
    for (int round = 0; round < 20; ++round) {
      const auto sum = world.all_reduce(at::full({round * 1000}, world.rank() + 1, at::kLong));
      if (round && sum[-1].item<std::int64_t>() != n * (n + 1) / 2)
        throw std::runtime_error("a wrong sum in the new world");
    }
    const auto half = world.split(world.rank() % 2, 0, "half");
    const auto ranks = half->all_gather(at::full({1}, world.rank(), at::kLong));
    if (ranks[0].item<std::int64_t>() != world.rank() % 2)
      throw std::runtime_error("a wrong group in the new world");
    say("rank " + std::to_string(world.rank()) + " recovered");
  });
}

// True when it throws an Error of this kind with these texts.
bool refuses(moesh::ErrorKind kind, const std::vector<std::string>& texts,
             const std::function<void()>& f) {
  try {
    f();
  } catch (const moesh::Error& e) {
    say(e.what());
    return e.kind() == kind && has_all(e.what(), texts);
  }
  say("nothing was refused");
  return false;
}

// Calls of launch that cannot be, in two processes.
bool bad_launches() {
  const auto nothing = [](Group&) {};
  bool right =
      refuses(moesh::ErrorKind::config,
              {"launch of 3 ranks on 2 MPI processes", "use 0 (one rank a process), 2, 4, ..."},
              [&] { launch(3, nothing); });
  launch(0, [&](Group& world) {
    if (world.size() != 2) right = false;
    if (!refuses(moesh::ErrorKind::config, {"launch inside launch"}, [&] { launch(2, nothing); }))
      right = false;
    world.barrier();
  });
  int process = 0;
  launch(0, [&](Group& world) { process = world.rank(); });
  right = refuses(moesh::ErrorKind::config,
                  {"ranks as world 3, and process", "must make the same calls of launch"},
                  [&] { launch(process == 0 ? 2 : 4, nothing); }) &&
          right;
  a_world_that_works(4);
  return right;
}

// True when launch threw what it should.
bool run(const faults::Fault& fault, int num_ranks) {
  std::atomic<bool> has_rank_1 = false;
  try {
    launch(num_ranks,
           [&](Group& world) {
             const std::string rank = "rank " + std::to_string(world.rank());
             say(rank + " is process " + std::to_string(getpid()));
             if (world.rank() == 1) has_rank_1 = true;
             try {
               faults::run(fault, world);
             } catch (const std::exception& e) {
               const bool right = world.rank() == 1 || has_all(e.what(), fault.texts);
               say(rank + " in " + fault.name + (right ? " threw: " : " threw something ELSE: ") +
                   e.what());
               throw;
             }
           },
           {.timeout = fault.timeout});
  } catch (const std::exception& e) {
    // The exception itself where it was thrown, elsewhere an Error that names the rank.
    const bool right = fault.name.starts_with("throws") && has_rank_1
                           ? e.what() == std::string("disk is full")
                           : has_all(e.what(), fault.texts);
    say("launch in " + fault.name + (right ? " threw: " : " threw something ELSE: ") + e.what());
    return right;
  }
  say("nothing went wrong in " + fault.name);
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const std::string name = argv[1];
  const int num_ranks = std::atoi(argv[2]);
  log_file = open(argv[3], O_WRONLY | O_APPEND | O_CREAT, 0600);
  if (name == "bad_launches") return bad_launches() ? 0 : 3;
  if (name == "recover") {
    for (const auto& fault : faults::all()) {
      if (!run(fault, num_ranks)) return 3;
      a_world_that_works(num_ranks);
    }
    return 0;
  }
  for (const auto& fault : all_faults())
    if (fault.name == name) return run(fault, num_ranks) ? 1 : 3;
  say("no fault '" + name + "'");
  return 2;
}
