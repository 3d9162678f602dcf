// What two micro-batches at a time, and joined actions of a pipeline, gain on links where rows
// travel as long as a rank computes, next to what the simulator says. Two ranks (ep 2), or four (pp
// 2 x ep 2), train in virtual time (tests/train/virtual_time.h).
//
//     bench_overlap_pipeline [--compute MS] [--device] [--op US] [--first FORWARD_MS BACKWARD_MS]
//                            [option ...]
//
// A rank computes MS (20) after each message of rows, twice as long in backward: on its host, or on
// a device. There an operator takes US of the host (0), and the first compute of a thread
// FORWARD_MS and BACKWARD_MS (0).

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/config/merge.h"
#include "moesh/pipeline/simulate.h"
#include "moesh/train/build.h"
#include "tests/train/virtual_time.h"

namespace moesh::train {
namespace {

int run(int argc, char** argv) {
  VirtualMachine machine{.compute = 0.02};
  std::vector<std::string> rest;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&] {
      MOESH_CHECK(i + 1 < argc, ErrorKind::config, name, " takes a value");
      return std::atof(argv[++i]);
    };
    if (name == "--compute")
      machine.compute = 1e-3 * value();
    else if (name == "--device")
      machine.has_device = true;
    else if (name == "--op")
      machine.op = 1e-6 * value();
    else if (name == "--first")
      machine.first_forward = 1e-3 * value(), machine.first_backward = 1e-3 * value();
    else
      rest.push_back(name);
  }
  const double compute = machine.compute;
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
    args.insert(args.end(), rest.begin(), rest.end());
    const Config off = config::load_config(args);
    args.emplace_back("--parallelism.overlap_experts=true");
    const Config on = config::load_config(args);
    // A layer computes for two messages in forward, and twice as long in backward; rows take 1.5
    // times as long as the compute after them in forward, so all of them as long as all of it.
    const VirtualStep free = step_in_virtual_time(off, {}, {});
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
    const VirtualStep without = step_in_virtual_time(off, machine, links),
                      with = step_in_virtual_time(on, machine, links);
    MOESH_CHECK(without.loss == with.loss, "the loss is ", without.loss, ", and joined ",
                with.loss);
    std::printf("%18s | %8.0f %8.0f | %8.0f %8.0f | %8.2f\n", schedule.c_str(), 1e3 * without.time,
                1e3 * expected(false), 1e3 * with.time, 1e3 * expected(true),
                without.time / with.time);
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
