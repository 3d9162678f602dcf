// What parallelism.overlap_experts gains on links where rows travel as long as a rank computes. Two
// ranks on two cores, which sleep while rows travel (comm/paced.h). A step without pacing says how
// long a rank computes; the links are then such that what the experts send takes as long, or the
// part of it that is asked for.
//
//     bench_overlap_experts [rounds] [traffic / compute] [option ...]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/train/pairs.h"
#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/observers.h"
#include "moesh/config/merge.h"
#include "moesh/train/build.h"

namespace moesh::train {
namespace {

using Clock = std::chrono::steady_clock;
double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

constexpr int kSteps = 1;

// How long this rank waits: for rows of the experts and their counts, and for others, parameters
// and gradients; and the bytes that it sends of the first.
class Waits final : public comm::ThreadObserver {
 public:
  void called(const comm::Operation& o) override {
    const bool is_expert = o.group.name().starts_with("ep");
    if (is_expert) bytes += comm::sent_bytes(o.op, o.bytes, o.own_bytes(), o.group.size());
    since_[o.number] = {is_expert, 0};
  }
  void waits(std::int64_t number) override {
    if (const auto found = since_.find(number); found != since_.end()) found->second.second = now();
  }
  void ended(std::int64_t number) override {
    const auto found = since_.extract(number);
    if (!found || found.mapped().second == 0) return;
    (found.mapped().first ? experts : others) += now() - found.mapped().second;
  }
  double experts = 0, others = 0;
  std::int64_t bytes = 0;

 private:
  std::map<std::int64_t, std::pair<bool, double>> since_;
};

struct Measured {
  double step = 0, waits = 0, others = 0, bytes = 0, loss = 0;  // of a step, the most of a rank
};

Measured measure(const Config& config, const std::optional<comm::Links>& links) {
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
        const auto step = [&] {
          model->each_param([](Stored& w, bool) { w.value.mutable_grad().reset(); });
          return accumulate_gradients(*model, step_batches(config, *dataset, mesh, 0),
                                      step_options(config))
              .total_loss;
        };
        step();
        Waits waits;
        world.barrier();
        const double begin = now();
        double loss = 0;
        for (int i = 0; i < kSteps; ++i) loss = step();
        world.barrier();
        const std::lock_guard lock(mutex);
        result.step = std::max(result.step, (now() - begin) / kSteps);
        result.waits = std::max(result.waits, waits.experts / kSteps);
        result.others = std::max(result.others, waits.others / kSteps);
        result.bytes = std::max(result.bytes, static_cast<double>(waits.bytes) / kSteps);
        result.loss = loss;
      },
      options);
  return result;
}

int run(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5;
  const double part = argc > 2 ? std::atof(argv[2]) : 1;
  // The experts send much, and parameters, which go over the same links, are few; attention takes
  // about as long as the experts.
  std::vector<std::string> args{"--model=mixtral:tiny",
                                "--model.dim=128",
                                "--model.num_layers=4",
                                "--model.num_heads=8",
                                "--model.num_kv_heads=8",
                                "--model.head_dim=32",
                                "--model.moe_ffn=256",
                                "--model.top_k=4",
                                "--mesh=dp_shard=2,ep=2",
                                "--parallelism.moe_dispatcher=all_to_all",
                                "--data.sequence_length=1024",
                                "--data.batch_size=1",
                                "--training.gradient_accumulation_steps=8"};
  for (int i = 3; i < argc; ++i) args.emplace_back(argv[i]);
  const Config off = config::load_config(args);
  args.emplace_back("--parallelism.overlap_experts=true");
  const Config on = config::load_config(args);
  std::printf("%10s %10s | %8s %8s %8s | %8s %8s %8s | %8s %10s\n", "compute ms", "traffic ms",
              "off ms", "waits", "others", "on ms", "waits", "others", "speed", "waits left");
  std::fflush(stdout);
  std::vector<double> speeds, left;
  for (int r = 0; r < rounds; ++r) {
    const Measured free = measure(off, std::nullopt);
    const double compute = free.step - free.waits - free.others, traffic = part * compute;
    const comm::Links links{.inside = {.latency = 10e-6, .bandwidth = free.bytes / traffic},
                            .between = {}};
    const Measured without = measure(off, links), with = measure(on, links);
    MOESH_CHECK(without.loss == free.loss && with.loss == free.loss, "the loss is ", free.loss,
                ", with paced links ", without.loss, ", and with two micro-batches at a time ",
                with.loss);
    speeds.push_back(without.step / with.step);
    left.push_back(with.waits / without.waits);
    std::printf("%10.0f %10.0f | %8.0f %8.0f %8.0f | %8.0f %8.0f %8.0f | %8.2f %10.2f\n",
                1e3 * compute, 1e3 * traffic, 1e3 * without.step, 1e3 * without.waits,
                1e3 * without.others, 1e3 * with.step, 1e3 * with.waits, 1e3 * with.others,
                speeds.back(), left.back());
    std::fflush(stdout);
  }
  const Median speed = median_of(speeds), rest = median_of(left);
  std::printf("median of %d: speed %.2f, waits left %.2f\n", rounds, speed.value, rest.value);
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
