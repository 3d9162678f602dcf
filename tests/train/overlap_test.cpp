// Gathers and reductions of a step that go on beside its computation, on threads and over the
// loopback table of NCCL, where a rank has one stream for all of them.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <thread>
#include <tuple>

#include "moesh/comm/launch.h"
#include "moesh/comm/nccl/nccl_group.h"
#include "moesh/config/merge.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/train/build.h"
#include "tests/comm/nccl_loopback.h"
#include "tests/comm/trace.h"
#include "tests/spmd/device.h"
#include "tests/support.h"
#include "tests/tier.h"

namespace moesh::train {
namespace {

using Args = std::vector<std::string>;

struct Result {
  std::vector<at::Tensor> gradients;
  std::vector<std::string> calls;  // group and operation
};

Config config_of(const Args& more) {
  Args args{"--model=qwen3_moe:tiny", "--model.num_layers=2", "--dtype=bfloat16",
            "--training.gradient_accumulation_steps=2", "--data.sequence_length=16"};
  args.insert(args.end(), more.begin(), more.end());
  return config::load_config(args);
}

Result gradients_on(comm::Group& world, const Config& config, nn::Probe* probe = nullptr) {
  const Mesh mesh(world, mesh_shape(config));
  const MeshScope scope(mesh);
  const auto model = make_model(config);
  const auto dataset = open_dataset(config);
  Result r;
  StepOptions options = step_options(config);
  options.forward.probe = probe;
  const comm::Trace trace;
  accumulate_gradients(*model, step_batches(config, *dataset, mesh, 0), options);
  for (const auto& e : trace.entries()) r.calls.push_back(e.group + " " + comm::to_string(e.op));
  model->each_param([&](Stored& w, bool) { r.gradients.push_back(w.value.grad().clone()); });
  return r;
}

enum class World { threads, nccl };

// The result of each rank.
std::vector<Result> results(const Config& config, World kind, nn::Probe* probe = nullptr,
                            std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  std::vector<Result> all(static_cast<std::size_t>(mesh_shape(config).num_ranks()));
  const auto f = [&](comm::Group& world) {
    all[static_cast<std::size_t>(world.rank())] = gradients_on(world, config, probe);
  };
  const int num_ranks = mesh_shape(config).num_ranks();
  if (kind == World::threads) {
    comm::LaunchOptions options = launch_options(config);
    options.timeout = timeout;
    comm::launch(num_ranks, f, options);
    return all;
  }
  const auto nccl = comm::loopback::make(at::kCPU, comm::loopback::Pace::queued);
  comm::launch(num_ranks,
               comm::on_nccl(f, {.timeout = timeout, .backend = comm::Backend::nccl}, nccl.api));
  EXPECT_EQ(nccl.count->aborted, 0);
  return all;
}

std::ptrdiff_t count(const std::vector<std::string>& calls, const std::string& call) {
  return std::count(calls.begin(), calls.end(), call);
}

const Args kMeshes{"dp_shard=2", "dp_shard=2,ep=2", "dp_replicate=2,dp_shard=2,ep=2",
                   "dp_shard=2,tp=2,ep=2"};

// Blocks freed and gathered again, recomputed, or kept: not a bit changes, with either world.
TEST(Overlap, GivesTheSameBits) {
  for (const auto& mesh : kMeshes)
    for (const Args& mode : {Args{}, Args{"--activation_checkpoint.mode=full"},
                             Args{"--activation_checkpoint.mode=selective"},
                             Args{"--parallelism.fsdp_reshard_after_forward=false"}}) {
      Args on = mode;
      on.push_back("--mesh=" + mesh);
      Args off = on;
      off.emplace_back("--parallelism.overlap_reductions=false");
      const auto expected = results(config_of(off), World::threads);
      for (const World kind : {World::threads, World::nccl}) {
        const auto found = results(config_of(on), kind);
        for (std::size_t r = 0; r < found.size(); ++r)
          for (std::size_t i = 0; i < found[r].gradients.size(); ++i)
            EXPECT_TRUE(at::equal(found[r].gradients[i], expected[r].gradients[i]))
                << mesh << (mode.empty() ? "" : " " + mode[0]) << ", rank " << r << ", parameter "
                << i;
      }
    }
}

// Two micro-batches at a time: not a bit changes, whatever way rows take, with an odd number of
// micro-batches, on either world; and every rank makes its calls in one order.
TEST(OverlapExperts, GivesTheSameBits) {
  int number = 0;  // in `make test` every third of these, which takes each mesh and each mode
  for (const auto& [mesh, ways] : std::vector<std::pair<std::string, Args>>{
           {"dp_shard=2,ep=2", {"all_to_all", "all_gather"}},
           {"dp_shard=2,tp=2,ep=2,etp=2", {"all_to_all", "all_gather"}},
           {"tp=2,ep=2", {"all_to_all", "all_gather"}},
           {"tp=2,etp=2", {"all_gather"}},
           {"dp_shard=4,ep=4,nodes=2", {"two_hops"}}})
    for (const auto& way : ways)
      for (const Args& mode : {Args{}, Args{"--activation_checkpoint.mode=full"},
                               Args{"--activation_checkpoint.mode=selective"},
                               Args{"--parallelism.fsdp_reshard_after_forward=false",
                                    "--parallelism.sequence_parallel=false"}}) {
        if (!is_long() && number++ % 3 != 0) continue;
        Args on = mode;
        const auto nodes = mesh.find(",nodes=");
        on.push_back("--mesh=" + mesh.substr(0, nodes));
        if (nodes != mesh.npos) on.emplace_back("--parallelism.ranks_per_node=2");
        on.push_back("--parallelism.moe_dispatcher=" + way);
        on.emplace_back("--model=deepseek_v3:tiny");
        on.emplace_back("--training.gradient_accumulation_steps=3");
        Args off = on;
        on.emplace_back("--parallelism.overlap_experts=true");
        SCOPED_TRACE(mesh + " " + way + (mode.empty() ? "" : " " + mode[0]));
        const auto expected = results(config_of(off), World::threads);
        for (const World kind : {World::threads, World::nccl}) {
          const auto found = results(config_of(on), kind);
          for (std::size_t r = 0; r < found.size(); ++r) {
            EXPECT_EQ(found[r].calls, found[0].calls);
            EXPECT_NE(found[r].calls, expected[r].calls) << "another order of calls";
            for (std::size_t i = 0; i < found[r].gradients.size(); ++i)
              EXPECT_TRUE(at::equal(found[r].gradients[i], expected[r].gradients[i]))
                  << "rank " << r << ", parameter " << i;
          }
        }
      }
}

// Rows of all_to_all are not begun ahead over etp: without ep, micro-batches go one by one, in
// their order.
TEST(OverlapExperts, WithoutAWaitMicroBatchesGoInTheirOrder) {
  const auto run = [](const std::string& is_on) {
    return results(config_of({"--mesh=tp=2,etp=2", "--parallelism.moe_dispatcher=all_to_all",
                              "--training.gradient_accumulation_steps=5",
                              "--parallelism.overlap_experts=" + is_on}),
                   World::threads);
  };
  const auto expected = run("false"), found = run("true");
  for (std::size_t r = 0; r < found.size(); ++r) {
    EXPECT_EQ(found[r].calls, expected[r].calls);
    for (std::size_t i = 0; i < found[r].gradients.size(); ++i)
      EXPECT_TRUE(at::equal(found[r].gradients[i], expected[r].gradients[i])) << r << ", " << i;
  }
}

// The forward of one micro-batch beside the backward of another: not a bit changes, on either
// world, and ranks with the same place on pp make their calls in one order.
TEST(OverlapExperts, JoinedActionsOfAPipelineGiveTheSameBits) {
  const std::vector<Args> modes{
      {},
      {"--activation_checkpoint.mode=full"},
      {"--activation_checkpoint.mode=selective"},
      {"--parallelism.fsdp_reshard_after_forward=false", "--parallelism.sequence_parallel=false"}};
  int number = 0;
  for (const auto& [mesh, schedule, num_micro] :
       std::vector<std::tuple<std::string, std::string, std::string>>{
           {"pp=2,dp_shard=2,ep=2", "dualpipev", "5"},
           {"pp=2,dp_shard=2,ep=2", "1f1b", "5"},
           {"pp=2,dp_shard=2,ep=2", "interleaved_1f1b", "5"},
           {"pp=2,tp=2,ep=2", "dualpipev", "3"},
           {"pp=4,dp_shard=2,ep=2", "dualpipev", "9"},
           {"pp=4,dp_shard=2,ep=2", "1f1b", "9"},
           {"pp=4,tp=2,ep=2", "interleaved_1f1b", "9"}})
    for (std::size_t m = 0; m < modes.size(); ++m) {
      const bool is_large = mesh.starts_with("pp=4");
      if (is_large && m % 2 == 0) continue;
      if (!is_long() && number++ % 5 % 2 != 0) continue;  // every mesh, and every mode
      Args off = modes[m];
      for (const std::string& arg :
           {"--mesh=" + mesh, "--parallelism.pipeline_parallel_schedule=" + schedule,
            "--training.gradient_accumulation_steps=" + num_micro,
            std::string("--model=deepseek_v3:tiny"), std::string("--dtype=float64"),
            std::string("--parallelism.moe_dispatcher=") +
                (m % 2 == 0 ? "all_to_all" : "all_gather"),
            std::string("--model.num_layers=") + (is_large ? "8" : "4")})
        off.push_back(arg);
      Args on = off;
      on.emplace_back("--parallelism.overlap_experts=true");
      SCOPED_TRACE(mesh + " " + schedule + (modes[m].empty() ? "" : " " + modes[m][0]));
      const auto expected = results(config_of(off), World::threads);
      for (const World kind : {World::threads, World::nccl}) {
        if (kind == World::nccl && (is_large || m > 1)) continue;
        const auto found = results(config_of(on), kind);
        const std::size_t num_of_stage = found.size() / (is_large ? 4 : 2);
        for (std::size_t r = 0; r < found.size(); ++r) {
          EXPECT_EQ(found[r].calls, found[r / num_of_stage * num_of_stage].calls);
          EXPECT_NE(found[r].calls, expected[r].calls) << "another order of calls";
          ASSERT_EQ(found[r].gradients.size(), expected[r].gradients.size());
          for (std::size_t i = 0; i < found[r].gradients.size(); ++i)
            EXPECT_TRUE(at::equal(found[r].gradients[i], expected[r].gradients[i]))
                << "rank " << r << ", parameter " << i;
        }
      }
    }
}

// Which micro-batch a rank works on, and the rows that it begins to send or waits for. While those
// of one micro-batch travel, the other one begins its own, in forward and in backward.
class RowEvents final : public comm::ThreadObserver {
 public:
  void called(const comm::Operation& o) override {
    if (o.op == comm::Collective::all_to_all) under_way_.insert(o.number), note();
  }
  void ended(std::int64_t number) override { under_way_.erase(number); }
  std::map<std::size_t, int> counts;  // of messages under way, when one is begun

 private:
  void note() { ++counts[under_way_.size()]; }
  std::set<std::int64_t> under_way_;
};

TEST(OverlapExperts, RowsOfOneTravelWhileTheOtherWorks) {
  const auto counts_of = [](const std::string& is_on) {
    const Config config = config_of({"--mesh=dp_shard=2,ep=2", "--model=mixtral:tiny",
                                     "--parallelism.moe_dispatcher=all_to_all",
                                     "--parallelism.overlap_experts=" + is_on});
    std::vector<std::map<std::size_t, int>> all(2);
    comm::launch(
        2,
        [&](comm::Group& world) {
          RowEvents events;
          gradients_on(world, config);
          all[static_cast<std::size_t>(world.rank())] = events.counts;
        },
        launch_options(config));
    EXPECT_EQ(all[0], all[1]);
    return all[0];
  };
  // 2 micro-batches x 2 blocks x (there and back) x (forward and backward).
  EXPECT_EQ(counts_of("false"), (std::map<std::size_t, int>{{1, 16}}));
  // All but the first in forward are begun while another one is under way.
  const auto on = counts_of("true");
  EXPECT_EQ(on.at(1), 1);
  EXPECT_EQ(on.at(2), 15);
}

// In a pipeline, where a forward and a backward are joined. Each stage of mixtral has a layer here:
// a micro-batch moves rows four times in it, there and back in forward and in backward.
TEST(OverlapExperts, RowsOfAForwardTravelWhileABackwardWorks) {
  const auto counts_of = [](const std::string& is_on) {
    const Config config = config_of(
        {"--mesh=pp=2,dp_shard=2,ep=2", "--model=mixtral:tiny", "--model.num_layers=4",
         "--parallelism.pipeline_parallel_schedule=dualpipev",
         "--parallelism.moe_dispatcher=all_to_all", "--training.gradient_accumulation_steps=6",
         "--parallelism.overlap_experts=" + is_on});
    std::vector<std::map<std::size_t, int>> all(4);
    comm::launch(
        4,
        [&](comm::Group& world) {
          RowEvents events;
          gradients_on(world, config);
          all[static_cast<std::size_t>(world.rank())] = events.counts;
        },
        launch_options(config));
    EXPECT_EQ(all[0], all[1]);
    EXPECT_EQ(all[2], all[3]);
    return std::pair(all[0], all[2]);
  };
  const int num_moves = 6 * 2 * 4;  // micro-batches x stages x moves
  const auto [first_off, last_off] = counts_of("false");
  EXPECT_EQ(first_off, (std::map<std::size_t, int>{{1, num_moves}}));
  EXPECT_EQ(last_off, first_off);
  // All that are joined but the first move of each pair are begun while another one is under way:
  // 2 (m - 2p + r + 1) of rank r, one less on the last rank, and p - 1 - r more.
  const auto [first, last] = counts_of("true");
  EXPECT_EQ(first.at(2), (2 * 3 + 1) * 3);
  EXPECT_EQ(last.at(2), (2 * 4 - 1) * 3);
  for (const auto& of_rank : {first, last}) EXPECT_EQ(of_rank.at(1) + of_rank.at(2), num_moves);
}

// What goes wrong in the other thread of a rank is what the rank says.
TEST(OverlapExperts, AFaultOfTheSecondIsThatOfTheRank) {
  class Fails final : public nn::Probe {
   public:
    at::Tensor on_choice(const nn::Choice& c) override {
      MOESH_CHECK(c.micro_batch != 1, ErrorKind::data, "micro-batch 1 is broken");
      return c.experts_NK;
    }
  } probe;
  expect_parts(
      error_of(
          [&] {
            results(config_of({"--mesh=dp_shard=2,ep=2", "--parallelism.overlap_experts=true"}),
                    World::threads, &probe);
          },
          ErrorKind::data),
      {"micro-batch 1 is broken"});
}

// In a pipeline it is that of both actions, the forward's here.
TEST(OverlapExperts, AFaultOfJoinedActionsNamesBoth) {
  class Fails final : public nn::Probe {
   public:
    at::Tensor on_choice(const nn::Choice& c) override {
      MOESH_CHECK(c.micro_batch != 3, ErrorKind::data, "micro-batch 3 is broken");
      return c.experts_NK;
    }
  } probe;
  expect_parts(error_of(
                   [&] {
                     results(config_of({"--mesh=pp=2,dp_shard=2,ep=2", "--model=mixtral:tiny",
                                        "--training.gradient_accumulation_steps=4",
                                        "--parallelism.overlap_experts=true"}),
                             World::threads, &probe);
                   },
                   ErrorKind::data),
               {"rank 0 of pp, forward of stage 0 for micro-batch 3 beside backward of stage 0 for "
                "micro-batch 0: ",
                "micro-batch 3 is broken"});
}

// NCCL hangs where two ranks call in different orders.
TEST(Overlap, EveryRankMakesItsCallsInOneOrder) {
  for (const auto& mesh : kMeshes)
    for (const Args& mode : {Args{}, Args{"--activation_checkpoint.mode=selective"}}) {
      Args args = mode;
      args.push_back("--mesh=" + mesh);
      const auto all = results(config_of(args), World::nccl);
      for (const auto& r : all) EXPECT_EQ(r.calls, all[0].calls) << mesh;
    }
}

// A schedule's sends and receives go beside the collectives of its stages: the bits of threads, and
// ranks with the same place on pp make their calls in one order.
TEST(Overlap, APipelineOverNcclIsThatOfThreads) {
  for (const auto& [mesh, schedule] : std::vector<std::pair<std::string, std::string>>{
           {"pp=2,tp=2", "zbv"},
           {"pp=2,dp_shard=2,ep=2", "1f1b"},
           {"pp=2,dp_shard=2,tp=2", "interleaved_1f1b"},
           {"pp=4", "zero_bubble"},
           {"pp=3", "gpipe"}}) {
    const Config config =
        config_of({"--mesh=" + mesh, "--model.num_layers=4", "--model.tie_embeddings=true",
                   "--training.gradient_accumulation_steps=5",
                   "--parallelism.pipeline_parallel_schedule=" + schedule});
    const auto expected = results(config, World::threads), found = results(config, World::nccl);
    const std::size_t num_of_stage = found.size() / (mesh[3] - '0');
    for (std::size_t r = 0; r < found.size(); ++r) {
      SCOPED_TRACE(mesh + " " + schedule + ", rank " + std::to_string(r));
      EXPECT_GE(count(found[r].calls, "pp send"), 5);
      EXPECT_GE(count(found[r].calls, "pp recv"), 5);
      EXPECT_EQ(found[r].calls, found[r / num_of_stage * num_of_stage].calls);
      ASSERT_EQ(found[r].gradients.size(), expected[r].gradients.size());
      for (std::size_t i = 0; i < found[r].gradients.size(); ++i)
        EXPECT_TRUE(at::equal(found[r].gradients[i], expected[r].gradients[i]))
            << "parameter " << i;
    }
  }
}

// Without resharding, however many micro-batches are under way, parameters of blocks are gathered
// once for all of them.
TEST(Overlap, MicroBatchesOfAPipelineShareTheirGathers) {
  for (const std::string mode : {"none", "selective", "full"}) {
    const auto run = [&](const std::string& num_micro, const std::string& reshard) {
      return results(config_of({"--mesh=pp=2,dp_shard=2,ep=2", "--model.num_layers=4",
                                "--activation_checkpoint.mode=" + mode,
                                "--parallelism.pipeline_parallel_schedule=gpipe",
                                "--training.gradient_accumulation_steps=" + num_micro,
                                "--parallelism.fsdp_reshard_after_forward=" + reshard}),
                     World::threads);
    };
    const auto expected = run("6", "true"), found = run("6", "false"), few = run("2", "false");
    for (std::size_t r = 0; r < found.size(); ++r) {
      for (std::size_t i = 0; i < found[r].gradients.size(); ++i)
        EXPECT_TRUE(at::equal(found[r].gradients[i], expected[r].gradients[i])) << r << ", " << i;
      // One more for each micro-batch: the embedding, or the head and the norm before it.
      const auto gathers = [&](const auto& all) {
        return count(all[r].calls, "dp_shard all_gather");
      };
      EXPECT_GT(gathers(few), 10);
      EXPECT_EQ(gathers(found) - gathers(few), 4 * (r < 2 ? 1 : 2)) << mode;
    }
  }
}

// The forward of an MoE layer takes its time.
class Slow final : public nn::Probe {
 public:
  at::Tensor on_choice(const nn::Choice& c) override {
    if (!c.for_balance) std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    return c.experts_NK;
  }
};

// No wait is as long as the deadline. The first two gradients are asked for before anything else,
// and the second of them takes three forwards. Each stage has one MoE layer.
TEST(Overlap, AHealthyPipelineMayTakeLongerThanTheDeadline) {
  const Config config =
      config_of({"--mesh=pp=2", "--training.gradient_accumulation_steps=4", "--model.num_layers=3",
                 "--parallelism.pipeline_parallel_layers_per_stage=2,1"});
  for (const World kind : {World::threads, World::nccl}) {
    Slow slow;
    EXPECT_EQ(results(config, kind, &slow, std::chrono::milliseconds(3200)).size(), 2u);
  }
}

// A message for each block, its experts apart, and not one for each parameter; a block's gathers
// for backward are called before the reductions of the block after it.
TEST(Overlap, SendsABlockInOneMessage) {
  const std::int64_t num_micro = 2, num_blocks = 2;
  const Args mesh{"--mesh=dp_shard=2,ep=2"};
  Args off = mesh;
  off.emplace_back("--parallelism.overlap_reductions=false");
  const auto later = results(config_of(mesh), World::threads)[0].calls,
             now = results(config_of(off), World::threads)[0].calls;
  const std::string group = "dp_shard";
  ASSERT_GT(count(now, group + " reduce_scatter"), 0) << "the name of the group";
  // The head with the last norm, each block, and the embedding.
  EXPECT_EQ(count(later, group + " reduce_scatter"), num_micro * (num_blocks + 2));
  EXPECT_GT(count(now, group + " reduce_scatter"), 3 * num_micro * num_blocks);
  // From the first sum on, that of the head: both blocks are gathered, the one before while the
  // last computes; then come their sums, and that of the embedding. Gathers in a row are one here.
  std::vector<std::string> of_group;
  for (const auto& call : later) {
    if (!call.starts_with(group + " ")) continue;
    const std::string op = call.substr(group.size() + 1);
    if (op != "all_gather" || of_group.empty() || of_group.back() != op) of_group.push_back(op);
  }
  const auto first_sum = std::find(of_group.begin(), of_group.end(), "reduce_scatter");
  ASSERT_GE(of_group.end() - first_sum, 5);
  EXPECT_EQ(std::vector<std::string>(first_sum, first_sum + 5),
            (std::vector<std::string>{"reduce_scatter", "all_gather", "reduce_scatter",
                                      "reduce_scatter", "reduce_scatter"}));
}

}  // namespace
}  // namespace moesh::train
