// What joined actions of a pipeline gain on links where rows travel as long as a rank computes,
// next to what the simulator says. Four ranks (pp 2 x ep 2) are threads, which sleep while rows
// travel (comm/paced.h) and, after each message of rows, as long as a device would compute: twice
// as long in backward. So it needs no cores.
//
//     bench_overlap_pipeline [rounds] [milliseconds of compute after a message] [option ...]

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "bench/train/pairs.h"
#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/observers.h"
#include "moesh/config/merge.h"
#include "moesh/pipeline/simulate.h"
#include "moesh/train/build.h"

namespace moesh::train {
namespace {

using Clock = std::chrono::steady_clock;
double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

// Sleeps after each message of rows has come, and counts their bytes.
class Computes final : public comm::ThreadObserver {
 public:
  explicit Computes(double seconds) : seconds_(seconds) {}
  void called(const comm::Operation& o) override {
    if (o.op != comm::Collective::all_to_all) return;
    bytes += static_cast<double>(comm::sent_bytes(o.op, o.bytes, o.own_bytes(), o.group.size()));
    ++num_messages;
    under_way_.insert(o.number);
  }
  void ended(std::int64_t number) override {
    if (under_way_.erase(number) == 0) return;
    const bool is_backward = !at::GradMode::is_enabled();
    std::this_thread::sleep_for(
        std::chrono::duration<double>(is_backward ? 2 * seconds_ : seconds_));
  }
  double bytes = 0;
  std::int64_t num_messages = 0;

 private:
  double seconds_;
  std::set<std::int64_t> under_way_;
};

struct Measured {
  double step = 0, message_bytes = 0, loss = 0;  // of a message: the mean of a rank
};

Measured measure(const Config& config, double compute, const std::optional<comm::Links>& links) {
  Measured result;
  std::mutex mutex;
  comm::LaunchOptions options = launch_options(config);
  options.links = links;
  options.num_threads = 1;
  comm::launch(
      mesh_shape(config).num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, mesh_shape(config));
        const MeshScope scope(mesh);
        const auto model = make_model(config);
        const auto dataset = open_dataset(config);
        const auto batches = step_batches(config, *dataset, mesh, 0);
        Computes computes(compute);
        world.barrier();
        const double begin = now();
        const double loss = accumulate_gradients(*model, batches, step_options(config)).total_loss;
        world.barrier();
        const std::lock_guard lock(mutex);
        result.step = std::max(result.step, now() - begin);
        result.message_bytes = std::max(
            result.message_bytes, computes.bytes / static_cast<double>(computes.num_messages));
        result.loss = loss;
      },
      options);
  return result;
}

int run(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 3;
  const double compute = 1e-3 * (argc > 2 ? std::atof(argv[2]) : 20);
  std::printf("%18s | %8s %8s | %8s %8s | %8s\n", "schedule", "apart ms", "expected", "joined",
              "expected", "speed");
  for (const std::string& schedule : pipeline::joined_schedule_names()) {
    std::vector<std::string> args{"--model=mixtral:tiny",
                                  "--model.num_layers=4",
                                  "--model.num_experts=16",
                                  "--model.top_k=8",
                                  "--mesh=pp=2,dp_shard=2,ep=2",
                                  "--parallelism.moe_dispatcher=all_to_all",
                                  "--parallelism.fsdp_reshard_after_forward=false",
                                  "--parallelism.pipeline_parallel_schedule=" + schedule,
                                  "--data.sequence_length=128",
                                  "--data.batch_size=1",
                                  "--training.gradient_accumulation_steps=8"};
    for (int i = 3; i < argc; ++i) args.emplace_back(argv[i]);
    const Config off = config::load_config(args);
    args.emplace_back("--parallelism.overlap_experts=true");
    const Config on = config::load_config(args);
    // A layer computes for two messages in forward, and twice as long in backward; rows take 1.5
    // times as long as the compute after them in forward, so all of them as long as all of it.
    const double travel = 1.5 * compute, bytes = measure(off, 0, std::nullopt).message_bytes;
    const comm::Links links{.inside = {.latency = 20e-6, .bandwidth = bytes / travel},
                            .between = {}};
    const auto v = static_cast<int>(pipeline_options(on).stages_of_a_rank);
    const double layers = 4 / (2.0 * v);
    const pipeline::Costs costs{.stages = {{.forward = layers * (2 * compute + 2 * travel),
                                            .backward_input = layers * (2 * compute + 2 * travel),
                                            .backward_weight = layers * 2 * compute,
                                            .forward_links = layers * 2 * travel,
                                            .backward_links = layers * 2 * travel}}};
    const auto expected = [&](bool is_joined) {
      return pipeline::simulate(pipeline::make_schedule(schedule, 2, v, 8, is_joined), costs).time;
    };
    std::vector<double> apart, joined, speeds;
    for (int r = 0; r < rounds; ++r) {
      const Measured without = measure(off, compute, links), with = measure(on, compute, links);
      MOESH_CHECK(without.loss == with.loss, "the loss is ", without.loss, ", and joined ",
                  with.loss);
      apart.push_back(without.step), joined.push_back(with.step);
      speeds.push_back(without.step / with.step);
    }
    std::printf("%18s | %8.0f %8.0f | %8.0f %8.0f | %8.2f\n", schedule.c_str(),
                1e3 * median_of(apart).value, 1e3 * expected(false), 1e3 * median_of(joined).value,
                1e3 * expected(true), median_of(speeds).value);
    std::fflush(stdout);
  }
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
