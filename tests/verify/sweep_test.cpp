#include "moesh/verify/sweep.h"

#include <gtest/gtest.h>

#include <set>

#include "moesh/base/error.h"

namespace moesh::verify {
namespace {

std::vector<std::string> names(const Sweep& sweep) {
  std::vector<std::string> all;
  for (const MeshShape& shape : sweep.shapes()) all.push_back(shape.describe());
  return all;
}

TEST(MeshSweep, goes_through_every_mesh_of_the_sizes_that_it_names) {
  EXPECT_EQ(parse_sweep("8").shapes().size(), 333u);
  EXPECT_EQ(parse_sweep("4").shapes().size(), 67u);
  const auto large = parse_sweep("5-8").shapes();
  EXPECT_EQ(large.size(), 333u - 67u);
  for (const auto& shape : large) EXPECT_TRUE(5 <= shape.num_ranks() && shape.num_ranks() <= 8);
}

TEST(MeshSweep, every_mesh_is_in_one_shard) {
  for (int count : {1, 2, 5, 7, 67}) {
    std::multiset<std::string> together;
    for (int index = 1; index <= count; ++index) {
      Sweep sweep = parse_sweep("4");
      sweep.shard = {index, count};
      const auto mine = names(sweep);
      EXPECT_LE(mine.size(), 67u / static_cast<unsigned>(count) + 1);
      together.insert(mine.begin(), mine.end());
    }
    const auto all = names(parse_sweep("4"));
    EXPECT_EQ(together, std::multiset<std::string>(all.begin(), all.end()));
  }
}

TEST(MeshSweep, a_sample_depends_on_its_seed_alone) {
  const auto draw = [](std::uint64_t seed) {
    Sweep sweep = parse_sweep("5-8");
    sweep.sample = Sample{40, seed};
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
    sweep.sample = Sample{40, 0}, sweep.shard = {index, 3};
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
  sweep.shard = {11, 12};
  EXPECT_NO_THROW(sweep.shapes());
  sweep.shard = {12, 12};
  EXPECT_THROW(sweep.shapes(), Error);
  sweep = parse_sweep("2");
  sweep.sample = Sample{12};
  EXPECT_THROW(sweep.shapes(), Error);
}

}  // namespace
}  // namespace moesh::verify
