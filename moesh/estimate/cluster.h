#pragma once
// The machines of a run: what a GPU computes and holds, and how fast bytes move inside a node and
// between nodes.

#include <string>
#include <vector>

#include "moesh/comm/group.h"
#include "moesh/comm/mesh.h"

namespace moesh::estimate {

struct Cluster {
  std::string gpu;
  int gpus_per_node = 8, num_nodes = 1;
  double peak_flops = 0;         // of dense matrix products in bfloat16
  double peak_float8_flops = 0;  // likewise in float8; 0: it has none
  double memory = 0;             // bytes of a GPU
  double memory_bandwidth = 0;   // bytes/s of a GPU
  double node_bandwidth = 0;     // bytes/s that a GPU sends to others of its node
  double network_bandwidth = 0;  // bytes/s that a GPU sends to other nodes
  double latency = 0;            // seconds of a collective, for each step of its ring

  int num_gpus() const { return gpus_per_node * num_nodes; }
};

/// The names of GPUs that come with moesh: "a100", "h100", ...
std::vector<std::string> known_gpus();

/// "h100x8:256": 256 nodes of 8 H100; or the name of a TOML file. Throws Error (config).
Cluster parse_cluster(const std::string& text);

/// This many H100, eight to a node or as many as divide them: the default cluster.
Cluster assumed_cluster(int num_gpus);

/// Some ranks that work together: how many, and how many of them share a node.
struct GroupShape {
  int size = 1, in_node = 1;
  bool crosses_nodes() const { return in_node < size; }
};

/// The group of rank 0 on these axes, with the ranks in their order over the nodes.
GroupShape group_shape(const Cluster& cluster, const MeshShape& mesh, Axes axes);

/// Seconds of `num_calls` collectives in which each rank sends `bytes` altogether. Rings inside a
/// node go on as one ring for each GPU between nodes, so that all network cards are busy.
double seconds(const Cluster& cluster, const GroupShape& group, comm::Collective op, double bytes,
               double num_calls);

}  // namespace moesh::estimate
