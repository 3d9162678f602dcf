// Two micro-batches at a time where a rank computes on a device, in virtual time.

#include <gtest/gtest.h>

#include "moesh/config/merge.h"
#include "tests/train/virtual_time.h"

namespace moesh::train {
namespace {

Config config_of(const std::string& schedule, bool is_two) {
  std::vector<std::string> args{"--model=mixtral:tiny",
                                "--model.num_layers=4",
                                "--moe.force_load_balance",
                                "--parallelism.moe_dispatcher=all_to_all",
                                "--parallelism.fsdp_reshard_after_forward=false",
                                "--data.sequence_length=64",
                                "--data.batch_size=1",
                                "--training.gradient_accumulation_steps=6"};
  args.push_back(schedule == "none" ? "--mesh=dp_shard=2,ep=2" : "--mesh=pp=2,dp_shard=2,ep=2");
  if (schedule != "none") args.push_back("--parallelism.pipeline_parallel_schedule=" + schedule);
  if (is_two) args.emplace_back("--parallelism.overlap_experts=true");
  return config::load_config(args);
}

constexpr double kCompute = 0.003;

// Rows of a message take 1.5 times as long as the compute after it.
comm::Links slow_links(const std::string& schedule) {
  const double bytes = step_in_virtual_time(config_of(schedule, false), {}, {}).message_bytes;
  return {.inside = {.latency = 0, .bandwidth = bytes / (1.5 * kCompute)}, .between = {}};
}

// A lane's waits stand in the stream of both lanes, in the order of their turns: that is the order
// in which a host would wait. So a device takes no longer than a host.
TEST(OverlapOnADevice, QueuesInTheOrderOfTurns) {
  for (const std::string schedule : {"none", "1f1b", "dualpipev"}) {
    SCOPED_TRACE(schedule);
    const comm::Links links = slow_links(schedule);
    const auto time = [&](bool is_two, bool has_device) {
      return step_in_virtual_time(config_of(schedule, is_two),
                                  {.compute = kCompute, .has_device = has_device}, links)
          .time;
    };
    const double two = time(true, true);
    EXPECT_NEAR(two, time(true, false), 0.02 * two);
    EXPECT_LT(two, 0.85 * time(false, true));
  }
}

// What libraries prepare for a thread is prepared once, not for each pair of actions or each step.
TEST(OverlapOnADevice, HasNoNewThreadsInTheSecondStep) {
  for (const std::string schedule : {"none", "1f1b"}) {
    SCOPED_TRACE(schedule);
    const comm::Links links = slow_links(schedule);
    VirtualMachine machine{.compute = kCompute, .has_device = true};
    const double time = step_in_virtual_time(config_of(schedule, true), machine, links).time;
    machine.first_forward = machine.first_backward = 10;
    EXPECT_EQ(step_in_virtual_time(config_of(schedule, true), machine, links).time, time);
  }
}

}  // namespace
}  // namespace moesh::train
