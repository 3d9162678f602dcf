// What parallelism.context_parallel_cut=balanced gains: steps of a model with a long sequence, with
// one piece of it on each cp rank and with two. Ranks are threads; the work of a rank is the time
// that its thread had a processor, which other programs do not change.
//
//     bench_context_parallel [rounds] [option ...]

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "bench/train/pairs.h"
#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "moesh/config/merge.h"
#include "moesh/train/build.h"

namespace moesh::train {
namespace {

using Clock = std::chrono::steady_clock;
double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }
double processor_time() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Measured {
  double step = 0, loss = 0;
  std::vector<double> work;  // of each rank

  double longest() const { return *std::ranges::max_element(work); }
  double share() const {
    return longest() * static_cast<double>(work.size()) /
           std::accumulate(work.begin(), work.end(), 0.0);
  }
};

Measured measure(const Config& config) {
  Measured result;
  result.work.resize(static_cast<size_t>(mesh_shape(config).num_ranks()));
  std::mutex mutex;
  comm::LaunchOptions options = launch_options(config);
  options.num_threads = 1;
  comm::launch(
      mesh_shape(config).num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, mesh_shape(config));
        const MeshScope scope(mesh);
        const auto model = make_model(config);
        const auto dataset = open_dataset(config);
        const auto step = [&] {
          model->each_param([](Stored& w, bool) { w.value.mutable_grad().reset(); });
          return accumulate_gradients(*model, step_batches(config, *dataset, mesh, 0),
                                      step_options(config))
              .total_loss;
        };
        step();
        world.barrier();
        const double begin = now(), worked = processor_time();
        const double loss = step();
        const double work = processor_time() - worked;
        world.barrier();
        const std::lock_guard lock(mutex);
        result.work[static_cast<size_t>(world.rank())] = work;
        result.step = std::max(result.step, now() - begin);
        result.loss = loss;
      },
      options);
  return result;
}

int run(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5;
  std::vector<std::string> args{"--model=qwen3_moe:tiny",
                                "--model.dim=128",
                                "--model.num_layers=2",
                                "--model.num_heads=8",
                                "--model.num_kv_heads=8",
                                "--model.head_dim=32",
                                "--model.moe_ffn=64",
                                "--model.max_sequence=65536",
                                "--mesh=cp=2",
                                "--data.sequence_length=8192",
                                "--data.batch_size=1"};
  for (int i = 2; i < argc; ++i) args.emplace_back(argv[i]);
  const auto with = [&](const char* cut) {
    std::vector<std::string> all = args;
    all.push_back(std::string("--parallelism.context_parallel_cut=") + cut);
    return config::load_config(all);
  };
  const Config contiguous = with("contiguous"), balanced = with("balanced");
  std::printf("%28s | %28s | %15s\n", "contiguous", "balanced", "contiguous /");
  std::printf("%8s %10s %8s | %8s %10s %8s | %8s %8s\n", "step ms", "longest ms", "/ mean",
              "step ms", "longest ms", "/ mean", "step", "longest");
  std::vector<double> steps, works;
  for (int r = 0; r < rounds; ++r) {
    const Measured one = measure(contiguous), two = measure(balanced);
    MOESH_CHECK(std::abs(one.loss - two.loss) < 1e-4 * std::abs(one.loss), "the loss is ", one.loss,
                " with a contiguous cut, and ", two.loss, " with a balanced one");
    steps.push_back(one.step / two.step), works.push_back(one.longest() / two.longest());
    std::printf("%8.0f %10.0f %8.3f | %8.0f %10.0f %8.3f | %8.2f %8.2f\n", 1e3 * one.step,
                1e3 * one.longest(), one.share(), 1e3 * two.step, 1e3 * two.longest(), two.share(),
                steps.back(), works.back());
    std::fflush(stdout);
  }
  std::printf("median of %d: step %.2f, longest rank %.2f\n", rounds, median_of(steps).value,
              median_of(works).value);
  return 0;
}

}  // namespace
}  // namespace moesh::train

int main(int argc, char** argv) {
  try {
    return moesh::train::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
