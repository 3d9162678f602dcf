#include "moesh/estimate/cluster.h"

#include <gtest/gtest.h>

#include <fstream>

#include "tests/expect_error.h"

namespace moesh::estimate {
namespace {

using comm::Collective;

TEST(Cluster, IsReadFromItsName) {
  const Cluster c = parse_cluster("h800x4:16");
  EXPECT_EQ(c.gpus_per_node, 4);
  EXPECT_EQ(c.num_nodes, 16);
  EXPECT_EQ(c.num_gpus(), 64);
  EXPECT_LT(c.node_bandwidth, parse_cluster("h100").node_bandwidth);
  EXPECT_EQ(parse_cluster("h100x4").num_gpus(), 4);
  // Eight GPUs, or eight nodes?
  expect_error([] { parse_cluster("h100:8"); },
               "h100x8:8 is 8 nodes of 8 GPUs, and h100x8:1 is one node of 8 GPUs");
  expect_error([] { parse_cluster("h200:2"); },
               "h200x8:2 is 2 nodes of 8 GPUs, and h200x2:1 is one node of 2 GPUs");
  EXPECT_EQ(assumed_cluster(64).num_nodes, 8);
  EXPECT_EQ(assumed_cluster(12).gpus_per_node, 6);
  EXPECT_EQ(assumed_cluster(3).num_gpus(), 3);
  for (const auto& name : known_gpus()) {
    const Cluster k = parse_cluster(name);
    EXPECT_GT(k.peak_flops, 1e14);
    EXPECT_GT(k.node_bandwidth, k.network_bandwidth);
  }
  expect_error([] { parse_cluster("v100x8:2"); },
               "no GPU is called 'v100'; write it as h100x8:256");
  expect_error([] { parse_cluster("h100x0:2"); }, "'0' is not a number of GPUs or nodes");
  expect_error([] { parse_cluster("h100x8:"); }, "'' is not a number of GPUs or nodes");
  expect_error([] { parse_cluster(""); }, "no GPU is called ''");
}

TEST(Cluster, IsReadFromAFile) {
  const std::string path = testing::TempDir() + "cluster_test.toml";
  const auto write = [&](const std::string& text) { std::ofstream(path) << text; };
  const std::string good =
      "gpu = \"mi300x\"\ngpus_per_node = 8\nnum_nodes = 4\npeak_tflops = 1307\n"
      "memory_gib = 192\nmemory_bandwidth_gbs = 5300\n"
      "node_bandwidth_gbs = 350\nnetwork_bandwidth_gbs = 40.5\nlatency_us = 6\n";
  write(good);
  const Cluster c = parse_cluster(path);
  EXPECT_EQ(c.gpu, "mi300x");
  EXPECT_EQ(c.num_gpus(), 32);
  EXPECT_EQ(c.peak_flops, 1307e12);
  EXPECT_EQ(c.memory, 192 * 0x1p30);
  EXPECT_EQ(c.network_bandwidth, 40.5e9);
  EXPECT_NEAR(c.latency, 6e-6, 1e-12);
  EXPECT_EQ(c.peak_float8_flops, 0) << "has none unless it is given";
  write(good + "peak_float8_tflops = 2615\n");
  EXPECT_EQ(parse_cluster(path).peak_float8_flops, 2615e12);
  write(good + "colour = 3\n");
  expect_error([&] { parse_cluster(path); }, ":10: colour is not a key of a cluster");
  write(good.substr(0, good.rfind("latency")));
  expect_error([&] { parse_cluster(path); }, "lacks latency_us");
  write("peak_tflops = 0\n");
  expect_error([&] { parse_cluster(path); }, "peak_tflops is 0; it takes a number above 0");
  write("num_nodes = 1.5\n");
  expect_error([&] { parse_cluster(path); }, "num_nodes is 1.5; it takes a whole number");
  expect_error([] { parse_cluster("/nowhere/x.toml"); }, "/nowhere/x.toml");
}

// Ranks fill nodes in their order, the last axis fastest.
TEST(Cluster, KnowsWhichAxesLeaveTheNode) {
  const Cluster c = parse_cluster("h100x8:8");
  const MeshShape mesh = MeshShape{.pp = 2, .dp_shard = 8, .tp = 4, .ep = 16}.validated();
  const auto in_node = [&](Axes axes) { return group_shape(c, mesh, axes).in_node; };
  EXPECT_EQ(in_node(tp), 4);
  EXPECT_EQ(in_node(dp_shard), 2);
  EXPECT_EQ(in_node(ep), 8);
  EXPECT_EQ(in_node(efsdp), 1);
  EXPECT_EQ(in_node(pp), 1);
  EXPECT_FALSE(group_shape(c, mesh, tp).crosses_nodes());
  EXPECT_TRUE(group_shape(c, mesh, ep).crosses_nodes());
  const MeshShape small = MeshShape{.tp = 2}.validated();
  EXPECT_EQ(group_shape(c, small, tp).in_node, 2);
}

TEST(Cluster, CountsSeconds) {
  Cluster c = parse_cluster("h100x8:8");
  c.node_bandwidth = 100, c.network_bandwidth = 10, c.latency = 0;
  // Inside a node, each rank's own bytes.
  EXPECT_EQ(seconds(c, {.size = 8, .in_node = 8}, Collective::all_gather, 700, 1), 7);
  // One rank a node: each ring goes over one card.
  EXPECT_EQ(seconds(c, {.size = 4, .in_node = 1}, Collective::all_gather, 300, 1), 30);
  // 2 nodes of 4: 800 bytes are gathered, 400 of them enter each node, over 4 cards.
  EXPECT_EQ(seconds(c, {.size = 8, .in_node = 4}, Collective::reduce_scatter, 700, 1), 10);
  // 4 of the 7 other ranks are on other nodes.
  EXPECT_EQ(seconds(c, {.size = 8, .in_node = 4}, Collective::all_to_all, 700, 1), 40);
  EXPECT_EQ(seconds(c, {.size = 1, .in_node = 1}, Collective::all_reduce, 700, 1), 0);
  c.latency = 1;
  EXPECT_EQ(seconds(c, {.size = 8, .in_node = 8}, Collective::all_gather, 0, 3), 21);
  EXPECT_EQ(seconds(c, {.size = 4, .in_node = 1}, Collective::all_gather, 0, 3), 6);
}

}  // namespace
}  // namespace moesh::estimate
