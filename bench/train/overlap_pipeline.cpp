// What two micro-batches at a time, and joined actions of a pipeline, gain on links where rows
// travel as long as a rank computes, next to what the simulator says. Two ranks (ep 2), or four (pp
// 2 x ep 2), are threads that train. Each has a clock of its own, which messages move on
// (comm/paced.h) and, after each message of rows, what a device would compute: twice as long in
// backward. So the times are those of the order in which ranks do things, and the same on any
// machine.
//
//     bench_overlap_pipeline [milliseconds of compute after a message] [option ...]

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/base/this_thread.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/observers.h"
#include "moesh/comm/paced.h"
#include "moesh/config/merge.h"
#include "moesh/pipeline/simulate.h"
#include "moesh/train/build.h"

namespace moesh::train {
namespace {

// The time of each rank, whose threads take turns. A rank that waits for others has their time from
// then on, if it is later.
class RankClock final : public comm::PaceClock {
 public:
  explicit RankClock(int num_ranks) : times_(static_cast<std::size_t>(num_ranks)) {}
  double now() const override { return mine(); }
  void sleep_until(double time) const override { mine() = std::max(mine(), time); }

 private:
  double& mine() const { return times_[static_cast<std::size_t>(this_thread.rank)]; }
  mutable std::vector<double> times_;
};

// Computes after each message of rows has come, and counts their bytes.
class Computes final : public comm::ThreadObserver {
 public:
  Computes(const RankClock& clock, double seconds) : clock_(clock), seconds_(seconds) {}
  void called(const comm::Operation& o) override {
    const auto sent =
        static_cast<double>(comm::sent_bytes(o.op, o.bytes, o.own_bytes(), o.group.size()));
    if (o.op == comm::Collective::send) transfer_bytes = sent;
    if (o.op != comm::Collective::all_to_all) return;
    bytes += sent;
    ++num_messages;
    under_way_.insert(o.number);
  }
  void ended(std::int64_t number) override {
    if (under_way_.erase(number) == 0) return;
    const bool is_backward = !at::GradMode::is_enabled();
    clock_.sleep_until(clock_.now() + (is_backward ? 2 * seconds_ : seconds_));
  }
  double bytes = 0, transfer_bytes = 0;
  std::int64_t num_messages = 0;

 private:
  const RankClock& clock_;
  double seconds_;
  std::set<std::int64_t> under_way_;
};

struct Measured {
  double step = 0, message_bytes = 0, loss = 0;  // of a message: the mean of a rank
  double transfer_bytes = 0;                     // to the next stage
};

Measured measure(const Config& config, double compute, const comm::Links& links) {
  Measured result;
  std::mutex mutex;
  comm::LaunchOptions options = launch_options(config);
  options.num_threads = 1;
  const int num_ranks = mesh_shape(config).num_ranks();
  comm::PacedWorld paced(links, 0, num_ranks);
  const RankClock clock(num_ranks);
  comm::launch(
      num_ranks,
      [&](comm::Group& world) {
        const Mesh mesh(world, mesh_shape(config));
        const MeshScope scope(mesh);
        const auto model = make_model(config);
        const auto dataset = open_dataset(config);
        const auto batches = step_batches(config, *dataset, mesh, 0);
        world.barrier();
        const comm::Pacer pacer(paced, clock);
        Computes computes(clock, compute);
        const double loss = accumulate_gradients(*model, batches, step_options(config)).total_loss;
        const std::lock_guard lock(mutex);
        result.step = std::max(result.step, clock.now());
        result.message_bytes = std::max(
            result.message_bytes, computes.bytes / static_cast<double>(computes.num_messages));
        result.transfer_bytes = std::max(result.transfer_bytes, computes.transfer_bytes);
        result.loss = loss;
      },
      options);
  return result;
}

int run(int argc, char** argv) {
  const double compute = 1e-3 * (argc > 1 ? std::atof(argv[1]) : 20);
  std::printf("%18s | %8s %8s | %8s %8s | %8s\n", "schedule", "apart ms", "expected", "joined",
              "expected", "speed");
  std::vector<std::string> schedules = pipeline::joined_schedule_names();
  schedules.insert(schedules.begin(), "none");
  for (const std::string& schedule : schedules) {
    const int num_ranks = schedule == "none" ? 1 : 2;
    std::vector<std::string> args{"--model=mixtral:tiny",
                                  "--model.num_layers=4",
                                  "--model.num_experts=16",
                                  "--model.top_k=8",
                                  detail::concat("--mesh=pp=", num_ranks, ",dp_shard=2,ep=2"),
                                  "--parallelism.moe_dispatcher=all_to_all",
                                  "--parallelism.fsdp_reshard_after_forward=false",
                                  "--data.sequence_length=512",
                                  "--data.batch_size=1",
                                  "--training.gradient_accumulation_steps=8"};
    if (num_ranks > 1) args.push_back("--parallelism.pipeline_parallel_schedule=" + schedule);
    for (int i = 2; i < argc; ++i) args.emplace_back(argv[i]);
    const Config off = config::load_config(args);
    args.emplace_back("--parallelism.overlap_experts=true");
    const Config on = config::load_config(args);
    // A layer computes for two messages in forward, and twice as long in backward; rows take 1.5
    // times as long as the compute after them in forward, so all of them as long as all of it.
    const Measured free = measure(off, 0, {});
    const double travel = 1.5 * compute, bandwidth = free.message_bytes / travel;
    const comm::Links links{.inside = {.latency = 20e-6, .bandwidth = bandwidth}, .between = {}};
    const int v = num_ranks == 1 ? 1 : static_cast<int>(pipeline_options(on).stages_of_a_rank);
    pipeline::Lane forward, backward;
    for (int layer = 0; layer < 4 / (num_ranks * v); ++layer) {
      forward.push_back({.message = 1e-9, .takes_turns = false});  // counts
      forward.push_back({.message = travel});
      forward.push_back({.compute = compute, .message = travel});
      forward.push_back({.compute = compute});
      backward.push_back({.message = travel});
      backward.push_back({.compute = 2 * compute, .message = travel});
      backward.push_back({.compute = 2 * compute});
    }
    const double apart_f = seconds_apart(forward), apart_b = seconds_apart(backward),
                 hidden = apart_f + apart_b - pipeline::seconds_in_turns({backward, forward}),
                 transfer = free.transfer_bytes / bandwidth;
    const auto expected = [&](bool is_joined) {
      if (num_ranks == 1) {  // all micro-batches, or every other one in each lane
        pipeline::Lane lane;
        for (int i = 0; i < (is_joined ? 4 : 8); ++i) {
          lane.insert(lane.end(), forward.begin(), forward.end());
          lane.insert(lane.end(), backward.begin(), backward.end());
          lane.push_back({.message = 1e-9});  // the other's turn after a backward
        }
        return pipeline::seconds_in_turns(std::vector(is_joined ? 2 : 1, lane));
      }
      const auto order = pipeline::make_schedule(schedule, 2, v, 8, is_joined);
      pipeline::Costs costs{.stages = {}};
      for (int stage = 0; stage < order.num_stages; ++stage) {
        // What goes to another rank is on the link before the rows of the next action.
        const auto sends_to = [&](int other) {
          return other >= 0 && other < order.num_stages &&
                 order.rank_with(other) != order.rank_with(stage);
        };
        // All that a backward computes comes with its messages: nothing is left for later.
        costs.stages.push_back({.forward = apart_f + sends_to(stage + 1) * transfer,
                                .backward_input = apart_b + sends_to(stage - 1) * transfer,
                                .backward_weight = 0,
                                .forward_links = hidden / 2,
                                .backward_links = hidden / 2});
      }
      return pipeline::simulate(order, costs).time;
    };
    const Measured without = measure(off, compute, links), with = measure(on, compute, links);
    MOESH_CHECK(without.loss == with.loss, "the loss is ", without.loss, ", and joined ",
                with.loss);
    std::printf("%18s | %8.0f %8.0f | %8.0f %8.0f | %8.2f\n", schedule.c_str(), 1e3 * without.step,
                1e3 * expected(false), 1e3 * with.step, 1e3 * expected(true),
                without.step / with.step);
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
