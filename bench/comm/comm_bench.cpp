// all_reduce, all_gather and all_to_all of float tensors, 4 KiB to 4 MiB a rank.
//   bench_comm                ranks are threads (2, 4, 8), against memcpy of the same bytes
//   mpirun -n 4 bench_comm    ranks are processes, against MPI's own collectives
// A result is checked before it is timed. Times are those of one call: the slowest rank of the best
// of several rounds. With --record FILE every time is also appended to a file, as "implementation
// collective ranks bytes microseconds".
//
// "bytes" is what all ranks together must read, n ranks with S bytes each; memcpy reads and writes
// as much:
//   all_gather   n * n*S    each rank copies the block of every rank
//   all_to_all   n * S      each rank copies one n-th of every rank
//   all_reduce   n * 2*S    each rank reads and sums one n-th of every rank, then copies the n sums
// memcpy runs from the same sources (the tensors of all ranks) into memory that is already mapped,
// and in step: the threads meet at a std::barrier after each round. Out of step each would copy its
// own few megabytes over and over, in its cache.

#include <ATen/ATen.h>

#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "mpi_collectives.h"

namespace moesh::bench {
namespace {

using comm::Group;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kSizes[] = {4 << 10, 64 << 10, 1 << 20, 4 << 20};
const char* const kCollectives[] = {"all_reduce", "all_gather", "all_to_all"};

double slowest(Group& g, double seconds) {
  return g.all_reduce(at::full({1}, seconds, at::kDouble), comm::ReduceOp::max).item<double>();
}

// Seconds of one call. Rounds are short and many, so that some fall between whatever else the
// machine does.
double measure(Group& g, const std::function<void()>& f) {
  for (int i = 0; i < 3; ++i) f();
  g.barrier();
  const auto first = Clock::now();
  for (int i = 0; i < 5; ++i) f();
  const double guess = slowest(g, std::chrono::duration<double>(Clock::now() - first).count() / 5);
  const int num_calls = std::max(1, static_cast<int>(0.004 / guess));
  const int num_rounds = std::clamp(static_cast<int>(0.2 / (guess * num_calls)), 8, 50);
  double best = std::numeric_limits<double>::max();
  for (int round = 0; round < num_rounds; ++round) {
    g.barrier();
    const auto begin = Clock::now();
    for (int i = 0; i < num_calls; ++i) f();
    best = std::min(
        best, slowest(g, std::chrono::duration<double>(Clock::now() - begin).count() / num_calls));
  }
  return best;
}

// The value of element i on rank r; small integers, so that sums are exact in any order.
float value(int rank, std::int64_t i) { return static_cast<float>((rank * 31 + i * 7) % 64); }

at::Tensor input(int rank, std::int64_t numel) {
  at::Tensor x = at::empty({numel});
  for (std::int64_t i = 0; i < numel; ++i) x.data_ptr<float>()[i] = value(rank, i);
  return x;
}

void check(const char* who, const std::string& collective, Group& g, const at::Tensor& y,
           std::int64_t numel) {
  const auto n = g.size();
  const auto block = numel / n;
  MOESH_CHECK(y.numel() == (collective == "all_gather" ? n * numel : numel), who, " ", collective,
              ": ", y.numel(), " elements");
  const auto* p = y.const_data_ptr<float>();
  for (std::int64_t i = 0; i < y.numel(); ++i) {
    float expected = 0;
    if (collective == "all_reduce") {
      for (int r = 0; r < n; ++r) expected += value(r, i);
    } else if (collective == "all_gather") {
      expected = value(static_cast<int>(i / numel), i % numel);
    } else {
      expected = value(static_cast<int>(i / block), g.rank() * block + i % block);
    }
    MOESH_CHECK(p[i] == expected, who, " ", collective, ": element ", i, " is ", p[i],
                " instead of ", expected);
  }
}

at::Tensor call(Group& g, const std::string& collective, const at::Tensor& x) {
  if (collective == "all_reduce") return g.all_reduce(x);
  if (collective == "all_gather") return g.all_gather(x);
  return g.all_to_all(x, {}, {});
}

// What every rank must read.
std::int64_t bytes_of(const std::string& collective, int num_ranks, std::int64_t size) {
  return collective == "all_gather"   ? num_ranks * size
         : collective == "all_reduce" ? 2 * size
                                      : size;
}

// The copies of the collective and nothing else, from the tensors of all ranks.
void copies(const std::string& collective, int rank, const std::vector<at::Tensor>& xs, float* to) {
  const auto n = static_cast<std::int64_t>(xs.size());
  const auto numel = xs[0].numel();
  for (std::int64_t k = 0; k < n; ++k) {
    const auto r = (rank + k) % n;
    const auto* from = xs[static_cast<size_t>(r)].const_data_ptr<float>();
    const auto copy = [&](float* t, const float* f, std::int64_t count) {
      std::memcpy(t, f, static_cast<size_t>(count) * sizeof(float));
    };
    if (collective == "all_gather") {
      copy(to + r * numel, from, numel);
    } else {
      const auto part = numel / n;
      copy(to + r * part, from + rank * part, part);
      if (collective == "all_reduce") copy(to + r * part, from + r * part, part);
    }
  }
}

void mpi_call(const std::string& collective, const at::Tensor& x, at::Tensor& y, int num_ranks) {
  const auto* from = x.const_data_ptr<float>();
  auto* to = y.data_ptr<float>();
  if (collective == "all_reduce") return mpi_all_reduce(from, to, x.numel());
  if (collective == "all_gather") return mpi_all_gather(from, to, x.numel());
  mpi_all_to_all(from, to, x.numel() / num_ranks);
}

struct Row {
  const char* other;  // what it is compared with
  std::string collective;
  int num_ranks;
  std::int64_t size;
  double ours, theirs;  // seconds
};

void print(const Row& row, const char* us, std::FILE* record) {
  const double bytes =
      static_cast<double>(row.num_ranks * bytes_of(row.collective, row.num_ranks, row.size));
  std::printf("%-11s %5d %8lld KiB %12.1f us %8.2f GB/s %12.1f us %8.2f GB/s %8.2f\n",
              row.collective.c_str(), row.num_ranks, static_cast<long long>(row.size / 1024),
              row.ours * 1e6, bytes / row.ours * 1e-9, row.theirs * 1e6, bytes / row.theirs * 1e-9,
              row.theirs / row.ours);
  std::fflush(stdout);
  if (!record) return;
  for (const auto& [name, seconds] : {std::pair{us, row.ours}, std::pair{row.other, row.theirs}})
    std::fprintf(record, "%s %s %d %lld %.2f\n", name, row.collective.c_str(), row.num_ranks,
                 static_cast<long long>(row.size), seconds * 1e6);
}

void print_head(const char* us, const char* other) {
  std::printf("%-11s %5s %12s %15s %13s %15s %13s %8s\n", "collective", "ranks", "a rank", us, "",
              other, "", "ratio");
}

// Ranks that are threads, against memcpy.
void bench_threads(int num_ranks, std::FILE* record) {
  for (const std::string collective : kCollectives)
    for (auto size : kSizes) {
      const auto numel = size / static_cast<std::int64_t>(sizeof(float));
      std::vector<at::Tensor> xs;
      for (int r = 0; r < num_ranks; ++r) xs.push_back(input(r, numel));
      std::barrier in_step(num_ranks);
      comm::launch(num_ranks, [&](Group& g) {
        const auto& x = xs[static_cast<size_t>(g.rank())];
        check("threads", collective, g, call(g, collective, x), numel);
        const double ours = measure(g, [&] { call(g, collective, x); });
        at::Tensor y = at::zeros({collective == "all_gather" ? num_ranks * numel : numel});
        const double theirs = measure(g, [&] {
          copies(collective, g.rank(), xs, y.data_ptr<float>());
          in_step.arrive_and_wait();
        });
        if (collective != "all_reduce") check("memcpy", collective, g, y, numel);
        if (g.rank() == 0)
          print({"memcpy", collective, num_ranks, size, ours, theirs}, "threads", record);
      });
    }
}

// Ranks that are processes, against MPI's own collectives.
void bench_mpi(std::FILE* record) {
  comm::launch(0, [&](Group& g) {
    if (g.rank() == 0) print_head("moesh mpi", "MPI");
    for (const std::string collective : kCollectives)
      for (auto size : kSizes) {
        const auto numel = size / static_cast<std::int64_t>(sizeof(float));
        const at::Tensor x = input(g.rank(), numel);
        check("mpi", collective, g, call(g, collective, x), numel);
        const double ours = measure(g, [&] { call(g, collective, x); });
        at::Tensor y = at::zeros({collective == "all_gather" ? g.size() * numel : numel});
        mpi_call(collective, x, y, g.size());
        check("MPI", collective, g, y, numel);
        const double theirs = measure(g, [&] { mpi_call(collective, x, y, g.size()); });
        if (g.rank() == 0)
          print({"MPI", collective, g.size(), size, ours, theirs}, "moesh-mpi", record);
      }
  });
}

int run(int argc, char** argv) {
  std::FILE* record = nullptr;
  if (argc == 3 && std::strcmp(argv[1], "--record") == 0) record = std::fopen(argv[2], "a");
  if (comm::num_launched_processes() > 0) {
    MOESH_CHECK(has_mpi_collectives(), ErrorKind::config,
                "built without MPI: run it without mpirun");
    bench_mpi(record);
  } else {
    print_head("moesh threads", "memcpy");
    for (int num_ranks : {2, 4, 8}) bench_threads(num_ranks, record);
  }
  if (record) std::fclose(record);
  return 0;
}

}  // namespace
}  // namespace moesh::bench

int main(int argc, char** argv) {
  try {
    return moesh::bench::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_comm: %s\n", e.what());
    return 1;
  }
}
