// What traces cost: a hook where nobody records, and steps that are recorded.
//   bench_trace [--pairs N] [--steps N] [--alone] OPTIONS OF moesh train
// Printed are the time of a hook while nothing records, how many of them a step of rank 0
// has, and so what they take of a step; then, of pairs of N plain steps and N recorded ones, the
// median of the differences. Times of steps are those of the cores (pairs.h). With --alone nothing
// is recorded, and printed is the time of a plain step: for tools/compare_programs.py, and a
// program without the hooks.

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/train/pairs.h"
#include "moesh/base/error.h"
#include "moesh/base/timeline.h"
#include "moesh/comm/launch.h"
#include "moesh/config/merge.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/train/build.h"
#include "moesh/train/step.h"
#include "moesh/train/timeline/record.h"
#include "tests/train/take_step.h"

namespace moesh {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Begin and end of a slice that nobody records; the least of many, since the machine does other
// things, too.
double hook_nanoseconds() {
  constexpr int kCalls = 100'000;
  double least = 1e9;
  for (int round = 0; round < 50; ++round) {
    const auto begin = Clock::now();
    for (int i = 0; i < kCalls; ++i) {
      const InSlice slice(SliceKind::op, "nobody");
      asm volatile("" ::: "memory");  // each looks anew
    }
    least = std::min(least, 1e9 * seconds_since(begin) / kCalls);
  }
  return least;
}

struct Trial {
  Trial(const config::Config& c, comm::Group& world)
      : config(c),
        mesh(world, mesh_shape(c)),
        scope(mesh),
        dataset(train::open_dataset(c)),
        model(train::make_model(c)),
        optimizer(train::make_optimizer(*model, c)) {}

  // Seconds of a step; with what a recorded one leaves.
  double run(int num_steps, TimelineRecord* record) {
    std::optional<Timeline> timeline;
    std::optional<train::RecordOperators> operators;
    std::optional<train::RecordCollectives> collectives;
    if (record) timeline.emplace(), operators.emplace(), collectives.emplace(*timeline);
    const double begin = cpu_seconds();
    for (int i = 0; i < num_steps; ++i)
      train::take_step(*model, *optimizer, train::step_batches(config, *dataset, mesh, 0), 1e-4,
                       train::step_options(config));
    const double seconds = (cpu_seconds() - begin) / num_steps;
    if (record) *record = timeline->take();
    return seconds;
  }

  config::Config config;
  Mesh mesh;
  MeshScope scope;
  std::unique_ptr<data::Dataset> dataset;
  std::unique_ptr<models::Model> model;
  std::unique_ptr<optim::Optimizer> optimizer;
};

void run_alone(int num_rounds, int num_steps, const std::vector<std::string>& args) {
  const config::Config config = config::load_config(args);
  std::vector<double> seconds;
  comm::launch(
      mesh_shape(config).num_ranks(),
      [&](comm::Group& world) {
        Trial trial(config, world);
        trial.run(2, nullptr);  // makes what is made once
        for (int i = 0; i < num_rounds; ++i) {
          world.barrier();
          const double of_all = trial.run(num_steps, nullptr);
          if (world.rank() == 0) seconds.push_back(of_all);
        }
      },
      launch_options(config));
  std::printf("%.6f\n", 1e3 * median_of(seconds).value);
}

void run(int num_pairs, int num_steps, const std::vector<std::string>& args) {
  const config::Config config = config::load_config(args);
  std::vector<double> alone, difference;
  TimelineRecord recorded;
  comm::launch(
      mesh_shape(config).num_ranks(),
      [&](comm::Group& world) {
        Trial trial(config, world);
        TimelineRecord mine;
        trial.run(2, &mine);  // makes what is made once
        for (int pair = 0; pair < num_pairs; ++pair) {
          double seconds[2];
          for (const bool records : {pair % 2 == 0, pair % 2 != 0})
            seconds[records] = trial.run(num_steps, records ? &mine : nullptr);
          if (world.rank() != 0) continue;
          alone.push_back(seconds[0]);
          difference.push_back(100 * (seconds[1] / seconds[0] - 1));
        }
        if (world.rank() == 0) recorded = mine;
      },
      launch_options(config));
  // A collective looks four times: called, started, waited for, ended. Operators have no hook of
  // moesh's.
  std::int64_t num_hooks = 4 * static_cast<std::int64_t>(recorded.collectives.size());
  for (const Slice& s : recorded.slices) num_hooks += s.kind == SliceKind::section;
  const double hook = hook_nanoseconds(), hooks = static_cast<double>(num_hooks) / num_steps,
               step = median_of(alone).value;
  const int num_ranks = mesh_shape(config).num_ranks();  // the time is that of all of them
  std::printf(
      "off: %.2f ns a hook, %.0f hooks a step and rank; %.3f ms of the cores: %.5f %% of it\n",
      hook, hooks, 1e3 * step, 100 * hook * hooks * num_ranks / (1e9 * step));
  const Median longer = median_of(difference);
  std::printf("on: %zu slices a step; %d pairs: %.2f %% longer (%.2f to %.2f)\n",
              recorded.slices.size() / static_cast<std::size_t>(num_steps), num_pairs, longer.value,
              longer.low, longer.high);
}

}  // namespace
}  // namespace moesh

int main(int argc, char** argv) try {
  int num_pairs = 20, num_steps = 1;
  bool is_alone = false;
  std::vector<std::string> rest{"--model=deepseek_v3:debug"};
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const bool is_pairs = name == "--pairs", is_steps = name == "--steps";
    if ((is_pairs || is_steps) && i + 1 < argc)
      (is_pairs ? num_pairs : num_steps) = std::max(1, std::stoi(argv[++i]));
    else if (name == "--alone")
      is_alone = true;
    else
      rest.push_back(name);
  }
  (is_alone ? moesh::run_alone : moesh::run)(num_pairs, num_steps, rest);
} catch (const std::exception& e) {
  std::fprintf(stderr, "bench_trace: %s\n", e.what());
  return 2;
}
