#include "moesh/estimate/cluster.h"

#include <algorithm>
#include <map>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/formats/file.h"
#include "moesh/formats/toml.h"

namespace moesh::estimate {
namespace {

// Bandwidths are what collectives reach: about 80 % of the links' own.
const std::vector<Cluster>& gpus() {
  const auto gpu = [](const char* name, double tflops, double float8, double gib, double hbm,
                      double node, double network) {
    return Cluster{.gpu = name,
                   .peak_flops = tflops * 1e12,
                   .peak_float8_flops = float8 * 1e12,
                   .memory = gib * 0x1p30,
                   .memory_bandwidth = hbm * 1e12,
                   .node_bandwidth = node * 1e9,
                   .network_bandwidth = network * 1e9,
                   .latency = 5e-6};
  };
  static const std::vector<Cluster> all{
      gpu("a100", 312, 0, 80, 2.0, 240, 20), gpu("h100", 989, 1979, 80, 3.35, 360, 40),
      gpu("h200", 989, 1979, 141, 4.8, 360, 40), gpu("h800", 989, 1979, 80, 3.35, 160, 40),
      gpu("b200", 2250, 4500, 180, 8.0, 720, 40)};
  return all;
}

int parse_count(const std::string& text, const std::string& whole) {
  const auto n = number_of<int>(text);
  MOESH_CHECK(n && *n >= 1 && *n <= 1'000'000, ErrorKind::config, "--cluster is '", whole,
              "', and '", text,
              "' is not a number of GPUs or nodes; write it as h100x8:256, for 256 nodes of 8 "
              "H100, or name a TOML file");
  return *n;
}

Cluster read_file(const std::string& path) {
  Cluster c{.gpu = path};
  const std::map<std::string, std::pair<double*, double>> keys{
      {"peak_tflops", {&c.peak_flops, 1e12}},
      {"peak_float8_tflops", {&c.peak_float8_flops, 1e12}},
      {"memory_gib", {&c.memory, 0x1p30}},
      {"memory_bandwidth_gbs", {&c.memory_bandwidth, 1e9}},
      {"node_bandwidth_gbs", {&c.node_bandwidth, 1e9}},
      {"network_bandwidth_gbs", {&c.network_bandwidth, 1e9}},
      {"latency_us", {&c.latency, 1e-6}}};
  const std::map<std::string, int*> counts{{"gpus_per_node", &c.gpus_per_node},
                                           {"num_nodes", &c.num_nodes}};
  constexpr const char* kFloat8 = "peak_float8_tflops";  // the others have to be there
  std::vector<std::string> missing;
  for (const auto& [name, target] : keys)
    if (name != kFloat8) missing.push_back(name);
  for (const auto& [name, target] : counts) missing.push_back(name);
  const std::string all = joined_by_or(missing);
  for (const formats::TomlEntry& e : formats::read_toml(path)) {
    const auto where = [&] { return detail::concat(path, ":", e.line, ": ", e.key); };
    const auto* whole = std::get_if<std::int64_t>(&e.value);
    const auto* real = std::get_if<double>(&e.value);
    const double number = whole ? static_cast<double>(*whole) : real ? *real : 0;
    if (e.key == "gpu" && std::holds_alternative<std::string>(e.value)) {
      c.gpu = std::get<std::string>(e.value);
      continue;
    }
    MOESH_CHECK(keys.contains(e.key) || counts.contains(e.key), ErrorKind::config, where(),
                " is not a key of a cluster; the keys are gpu, ", kFloat8, ", ", all);
    MOESH_CHECK(number > 0 && number < 1e9, ErrorKind::config, where(), " is ",
                formats::to_toml(e.value), "; it takes a number above 0");
    if (counts.contains(e.key)) {
      MOESH_CHECK(whole, ErrorKind::config, where(), " is ", number, "; it takes a whole number");
      *counts.at(e.key) = static_cast<int>(*whole);
    } else {
      const auto& [target, unit] = keys.at(e.key);
      *target = number * unit;
    }
    std::erase(missing, e.key);
  }
  MOESH_CHECK(missing.empty(), ErrorKind::config, path, " lacks ", missing[0],
              "; a cluster has gpus_per_node, num_nodes and all of ", all);
  return c;
}

}  // namespace

std::vector<std::string> known_gpus() {
  std::vector<std::string> names;
  for (const Cluster& c : gpus()) names.push_back(c.gpu);
  return names;
}

Cluster parse_cluster(const std::string& text) {
  if (text.ends_with(".toml")) return read_file(text);
  const auto colon = text.find(':'), cross = text.rfind('x', colon);
  const std::string name = text.substr(0, std::min({cross, colon, text.size()}));
  for (const Cluster& known : gpus()) {
    if (known.gpu != name) continue;
    Cluster c = known;
    if (cross == std::string::npos && colon != std::string::npos) {
      const int n = parse_count(text.substr(colon + 1), text);
      throw Error(
          ErrorKind::config,
          detail::concat("--cluster is '", text, "', which could mean nodes or GPUs; ", name,
                         "x8:", n, " is ", n, n == 1 ? " node" : " nodes", " of 8 GPUs, and ", name,
                         "x", n, ":1 is one node of ", n, n == 1 ? " GPU" : " GPUs"));
    }
    if (cross != std::string::npos)
      c.gpus_per_node = parse_count(text.substr(cross + 1, colon - cross - 1), text);
    if (colon != std::string::npos) c.num_nodes = parse_count(text.substr(colon + 1), text);
    return c;
  }
  throw Error(ErrorKind::config,
              detail::concat("--cluster is '", text, "', and no GPU is called '", name,
                             "'; write it as h100x8:256 with ", joined_by_or(known_gpus()),
                             ", or name a TOML file for another (docs/estimate.md)"));
}

Cluster assumed_cluster(int num_gpus) {
  int in_node = 8;
  while (num_gpus % in_node != 0) --in_node;
  return parse_cluster(detail::concat("h100x", in_node, ":", num_gpus / in_node));
}

GroupShape group_shape(const Cluster& cluster, const MeshShape& mesh, Axes axes) {
  GroupShape g{.size = mesh.size(axes), .in_node = 0};
  const int here = mesh.group_number(0, axes);
  for (int r = 0; r < std::min(cluster.gpus_per_node, mesh.num_ranks()); ++r)
    g.in_node += mesh.group_number(r, axes) == here;
  return g;
}

double seconds(const Cluster& cluster, const GroupShape& g, comm::Collective op, double bytes,
               double num_calls) {
  if (g.size <= 1) return 0;
  const double n = g.size, here = g.in_node;
  if (op == comm::Collective::all_to_all) {
    // Rows go straight to their rank: each GPU sends what leaves the node over its own card.
    const double outside = bytes * (n - here) / (n - 1), inside = bytes - outside;
    return std::max(inside / cluster.node_bandwidth, outside / cluster.network_bandwidth) +
           num_calls * cluster.latency * (g.crosses_nodes() ? 2 : 1);
  }
  const double num_nodes = n / here;
  const double inside = here > 1 ? bytes / cluster.node_bandwidth : 0;
  // What enters a node enters it once, over the cards of all members there.
  const double outside =
      g.crosses_nodes() ? bytes * (num_nodes - 1) / num_nodes * n / (n - 1) / here : 0;
  // A tree takes as many steps as the number of nodes has bits.
  double steps = std::min(here, n) - 1;
  for (double nodes = 1; nodes < num_nodes; nodes *= 2) steps += 1;
  return std::max(inside, outside / cluster.network_bandwidth) +
         num_calls * cluster.latency * std::max(1.0, steps);
}

}  // namespace moesh::estimate
