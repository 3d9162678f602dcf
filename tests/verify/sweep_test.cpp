#include "moesh/verify/verify.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "moesh/base/error.h"
#include "moesh/config/merge.h"
#include "moesh/pipeline/schedule.h"

namespace moesh::verify {
namespace {

// 333 meshes without pp, 67 of them of up to four ranks; with pp 13 of up to four, each with six
// schedules, and 80 larger ones.
constexpr std::size_t kUpToFour = 67 + 13 * 6, kAll = 333 + 13 * 6 + 80;

std::vector<std::string> names(const Sweep& sweep) {
  std::vector<std::string> all;
  for (const SweepMesh& mesh : sweep.meshes()) all.push_back(mesh.describe());
  return all;
}

TEST(MeshSweep, goes_through_every_mesh_of_the_sizes_that_it_names) {
  EXPECT_EQ(parse_sweep("8").meshes().size(), kAll);
  EXPECT_EQ(parse_sweep("4").meshes().size(), kUpToFour);
  const auto large = parse_sweep("5-8").meshes();
  EXPECT_EQ(large.size(), kAll - kUpToFour);
  for (const auto& mesh : large)
    EXPECT_TRUE(5 <= mesh.shape.num_ranks() && mesh.shape.num_ranks() <= 8);
}

TEST(MeshSweep, leaves_out_cp_where_a_model_refuses_it_and_nothing_else) {
  std::vector<std::string> expected;
  for (const SweepMesh& mesh : parse_sweep("8").meshes())
    if (mesh.shape.cp == 1) expected.push_back(mesh.describe());
  Sweep sweep = parse_sweep("8");
  sweep.with_cp = false;
  EXPECT_EQ(names(sweep), expected);
  EXPECT_LT(expected.size(), kAll);
}

TEST(MeshSweep, small_pipelines_have_every_schedule_and_all_schedules_have_large_ones) {
  std::map<std::string, std::set<std::string>> small;
  std::set<std::string> large;
  for (const SweepMesh& mesh : parse_sweep("8").meshes()) {
    if (mesh.shape.pp == 1) continue;
    if (mesh.shape.num_ranks() <= kEverySchedule)
      small[mesh.shape.describe()].insert(mesh.schedule);
    else
      large.insert(mesh.schedule);
  }
  const auto& all = pipeline::schedule_names();
  EXPECT_EQ(small.size(), 13u);
  for (const auto& [mesh, schedules] : small) EXPECT_EQ(schedules.size(), all.size()) << mesh;
  EXPECT_EQ(large, std::set<std::string>(all.begin(), all.end()));
}

TEST(MeshSweep, some_meshes_have_nodes_of_two_and_of_four_ranks_over_which_tokens_take_two_hops) {
  std::map<int, std::size_t> num;
  std::set<std::string> axes;
  std::size_t num_spread = 0;
  const config::Config config = config::load_config({"--model=deepseek_v3:tiny"});
  for (const SweepMesh& mesh : parse_sweep("8").meshes()) {
    const MeshShape& s = mesh.shape;
    EXPECT_TRUE(s.ep > 1 || s.ranks_per_node == 0);
    num_spread += s.ep > 1;
    if (s.ranks_per_node == 0) continue;
    EXPECT_GT(s.num_nodes_of_ep(), 1) << s.describe();
    ++num[s.ranks_per_node];
    if (s.size(ep_inside) > 1) axes.insert("inside");
    if (s.etp > 1) axes.insert("etp");
    if (s.pp > 1) axes.insert("pp");
    EXPECT_EQ(fitted(config, mesh).parallelism.moe_dispatcher, "two_hops");
    EXPECT_EQ(mesh_shape(fitted(config, mesh)).ranks_per_node, s.ranks_per_node);
  }
  EXPECT_EQ(num.size(), 2u);
  EXPECT_GE(num[2], 20u);
  EXPECT_GE(num[4], 5u);
  EXPECT_LT(num[2] + num[4], num_spread);  // the others go as `auto` says
  EXPECT_EQ(axes.size(), 3u);
}

TEST(MeshSweep, cuts_of_sequences_take_turns_beside_every_other_axis) {
  std::map<std::string, std::set<std::string>> axes;
  for (const SweepMesh& mesh : parse_sweep("8").meshes()) {
    const MeshShape& s = mesh.shape;
    EXPECT_EQ(mesh.cut == "auto", s.cp == 1);
    if (s.cp == 1) continue;
    axes[mesh.cut].insert(detail::concat("cp", s.cp));
    for (const auto& [name, size] : std::map<std::string, int>{
             {"pp", s.pp}, {"dp", s.dp_shard}, {"tp", s.tp}, {"ep", s.ep}, {"etp", s.etp}})
      if (size > 1) axes[mesh.cut].insert(name);
  }
  const std::set<std::string> all{"cp2", "cp3", "cp4", "cp5", "cp6", "cp7",
                                  "cp8", "pp",  "dp",  "tp",  "ep",  "etp"};
  EXPECT_EQ(axes["balanced"], all);
  EXPECT_EQ(axes["contiguous"], all);
  const auto cut_of = [](const std::vector<std::string>& args) {
    return fitted(config::load_config(args), {.shape = {.cp = 2}, .cut = "balanced"})
        .parallelism.context_parallel_cut;
  };
  EXPECT_EQ(cut_of({}), "balanced");
  EXPECT_EQ(cut_of({"--parallelism.context_parallel_cut=contiguous"}), "contiguous");
}

TEST(MeshSweep, some_pipelines_of_every_kind_are_tied) {
  std::set<std::string> schedules, axes;
  std::size_t num_tied = 0, num_pipelines = 0;
  for (const SweepMesh& mesh : parse_sweep("8").meshes()) {
    const MeshShape& s = mesh.shape;
    num_pipelines += s.pp > 1;
    if (!mesh.is_tied) continue;
    ++num_tied;
    EXPECT_GT(s.pp, 1);
    schedules.insert(mesh.schedule);
    axes.insert(detail::concat("pp", s.pp));
    for (const auto& [name, size] : std::map<std::string, int>{{"dp_replicate", s.dp_replicate},
                                                               {"dp_shard", s.dp_shard},
                                                               {"cp", s.cp},
                                                               {"tp", s.tp},
                                                               {"ep", s.ep},
                                                               {"etp", s.etp}})
      if (size > 1) axes.insert(name);
  }
  EXPECT_GE(kEveryTied * (num_tied + 8), num_pipelines);  // counted anew for each number of ranks
  EXPECT_LE(kEveryTied * num_tied, num_pipelines);
  const auto& all = pipeline::schedule_names();
  EXPECT_EQ(schedules, std::set<std::string>(all.begin(), all.end()));
  EXPECT_EQ(axes, (std::set<std::string>{"pp2", "pp3", "pp4", "pp7", "pp8", "dp_replicate",
                                         "dp_shard", "cp", "tp", "ep", "etp"}));
}

// One micro-batch would leave no rank with two at once; what somebody asks for stays.
TEST(MeshSweep, pipelines_have_several_micro_batches) {
  const auto of = [](const std::vector<std::string>& args) {
    return config::num_micro_batches(
        with_micro_batches(config::load_config(args), "verify's default"));
  };
  EXPECT_EQ(of({"--mesh=pp=3"}), 4);
  EXPECT_EQ(of({"--mesh=tp=2"}), 1);
  EXPECT_EQ(of({"--mesh=pp=3", "--training.gradient_accumulation_steps=1"}), 1);
  EXPECT_EQ(of({"--mesh=pp=3", "--training.gradient_accumulation_steps=7"}), 7);
  EXPECT_EQ(of({"--mesh=pp=3", "--training.global_batch_size=4"}), 2);
  EXPECT_EQ(of({"--mesh=pp=3", "--parallelism.overlap_experts=true"}), 7);
}

TEST(MeshSweep, every_mesh_is_in_one_shard) {
  for (int count : {1, 2, 5, 7, 67}) {
    std::multiset<std::string> together;
    for (int index = 1; index <= count; ++index) {
      Sweep sweep = parse_sweep("4");
      sweep.shard = {index, count};
      const auto mine = names(sweep);
      EXPECT_LE(mine.size(), kUpToFour / static_cast<std::size_t>(count) + 1);
      together.insert(mine.begin(), mine.end());
    }
    const auto all = names(parse_sweep("4"));
    EXPECT_EQ(together, std::multiset<std::string>(all.begin(), all.end()));
  }
}

TEST(MeshSweep, a_sample_depends_on_its_seed_alone) {
  const auto draw = [](std::uint64_t seed) {
    Sweep sweep = parse_sweep("5-8");
    sweep.sample = MeshSample{40, seed};
    return names(sweep);
  };
  const auto first = draw(0), again = draw(0), other = draw(1);
  EXPECT_EQ(first, again);
  EXPECT_NE(first, other);
  EXPECT_EQ(std::set<std::string>(first.begin(), first.end()).size(), 40u);
  // Shards are pieces of the sample, not samples of their own.
  std::set<std::string> together;
  for (int index : {1, 2, 3}) {
    Sweep sweep = parse_sweep("5-8");
    sweep.sample = MeshSample{40, 0}, sweep.shard = {index, 3};
    for (const auto& name : names(sweep)) together.insert(name);
  }
  EXPECT_EQ(together, std::set<std::string>(first.begin(), first.end()));
}

TEST(MeshSweep, says_what_it_cannot_take) {
  for (const char* text : {"", "0", "-", "8-", "8-5", "0-3", "four", "3-x", "2.5"})
    EXPECT_THROW(parse_sweep(text), Error) << text;
  for (const char* text : {"", "1", "0/2", "3/2", "1/", "/2", "1/2/3", "a/b"})
    EXPECT_THROW(parse_shard(text), Error) << text;
  Sweep sweep = parse_sweep("2");
  sweep.shard = {17, 18};
  EXPECT_NO_THROW(sweep.meshes());
  sweep.shard = {18, 18};
  EXPECT_THROW(sweep.meshes(), Error);
  sweep = parse_sweep("2");
  sweep.sample = MeshSample{18};
  EXPECT_THROW(sweep.meshes(), Error);
}

}  // namespace
}  // namespace moesh::verify
