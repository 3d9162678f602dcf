#include "moesh/nn/dispatch.h"

#include <algorithm>
#include <limits>
#include <set>
#include <sstream>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/comm/launch.h"

namespace moesh::nn {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// That none of `chosen` out of `all` is one of `here`.
double chance_of_none(double all, double here, std::int64_t chosen) {
  double p = 1;
  for (std::int64_t i = 0; i < chosen; ++i) {
    const auto taken = static_cast<double>(i);
    p *= std::max(0.0, all - here - taken) / (all - taken);
  }
  return p;
}

// That exactly c of `chosen` out of `all` are among `here`.
double chance_of(std::int64_t c, std::int64_t all, std::int64_t here, std::int64_t chosen) {
  const auto choose = [](std::int64_t n, std::int64_t k) {
    double ways = k > n ? 0 : 1;
    for (std::int64_t i = 0; i < k && ways > 0; ++i)
      ways *= static_cast<double>(n - i) / static_cast<double>(i + 1);
    return ways;
  };
  return choose(here, c) * choose(all - here, chosen - c) / choose(all, chosen);
}

double mean_nodes_in_turn(const RouterConfig& r, std::int64_t num_nodes) {
  std::int64_t sum = 0;
  for (std::int64_t token = 0; token < r.num_experts; ++token) {
    std::set<std::int64_t> nodes;
    for (std::int64_t k = 0; k < r.top_k; ++k)
      nodes.insert((token * r.top_k + k) % r.num_experts * num_nodes / r.num_experts);
    sum += static_cast<std::int64_t>(nodes.size());
  }
  return static_cast<double>(sum) / static_cast<double>(r.num_experts);
}

struct NamedTime {
  const char* name;
  double time;
};
std::vector<NamedTime> by_time(const DispatchTimes& t) {
  // The one with fewer messages comes first among equals.
  std::vector<NamedTime> all{
      {"all_gather", t.all_gather}, {"all_to_all", t.all_to_all}, {"two_hops", t.two_hops}};
  std::erase_if(all, [](const NamedTime& n) { return n.time == kNever; });
  std::stable_sort(all.begin(), all.end(),
                   [](const NamedTime& a, const NamedTime& b) { return a.time < b.time; });
  return all;
}

}  // namespace

double mean_nodes(const RouterConfig& r, int num_nodes) {
  if (num_nodes == 1) return 1;
  if (r.forced_balance) return mean_nodes_in_turn(r, num_nodes);
  const double all = static_cast<double>(r.num_experts), nodes = num_nodes,
               in_group = all / static_cast<double>(r.num_groups),
               allowed = in_group * static_cast<double>(r.top_groups);
  // Groups that neither make up nodes nor divide into them: as if there were none.
  double on_a_node = 1 - chance_of_none(all, all / nodes, r.top_k);
  if (r.num_groups % num_nodes == 0) {
    const std::int64_t here = r.num_groups / num_nodes;
    on_a_node = 0;
    for (std::int64_t c = 1; c <= std::min(here, r.top_groups); ++c)
      on_a_node += chance_of(c, r.num_groups, here, r.top_groups) *
                   (1 - chance_of_none(allowed, in_group * static_cast<double>(c), r.top_k));
  } else if (num_nodes % r.num_groups == 0) {
    on_a_node = allowed / all * (1 - chance_of_none(allowed, all / nodes, r.top_k));
  }
  return nodes * on_a_node;
}

const char* to_string(Dispatcher d) {
  switch (d) {
    case Dispatcher::automatic: return "auto";
    case Dispatcher::local: return "local";
    case Dispatcher::all_to_all: return "all_to_all";
    case Dispatcher::all_gather: return "all_gather";
    case Dispatcher::two_hops: return "two_hops";
  }
  return "unknown";
}

Dispatcher resolve(Dispatcher asked, const MeshShape& shape, const RouterConfig& router,
                   Transport exchange) {
  const int ranks = shape.ep * shape.etp;
  MOESH_CHECK(asked != Dispatcher::local || ranks == 1, ErrorKind::config,
              "dispatcher 'local' needs ep = etp = 1; here ep = ", shape.ep, ", etp = ", shape.etp,
              ". Use 'auto', 'all_to_all' or 'all_gather'.");
  MOESH_CHECK(asked != Dispatcher::two_hops || shape.num_nodes_of_ep() > 0, ErrorKind::config,
              "dispatcher 'two_hops' needs nodes with the same number of ranks of ep on each; here "
              "ep = ",
              shape.ep, ", etp = ", shape.etp, ", and a node has ", shape.ranks_per_node,
              " ranks. Use 'auto', 'all_to_all' or 'all_gather'.");
  if (asked != Dispatcher::automatic) return asked;
  if (ranks == 1) return Dispatcher::local;
  const DispatchTimes t = dispatch_times(dispatch_rates(exchange), shape, router);
  if (t.two_hops < std::min(t.all_to_all, t.all_gather)) return Dispatcher::two_hops;
  return t.all_to_all < t.all_gather ? Dispatcher::all_to_all : Dispatcher::all_gather;
}

Transport transport_of(at::Device device) {
  const bool launched = comm::num_launched_processes() > 0;
  if (device.is_cuda()) return launched ? Transport::nccl : Transport::threads_on_gpu;
  return launched ? Transport::mpi : Transport::threads_on_cpu;
}

Transport planned_exchange(at::Device device) {
  return device.is_cuda() && !device.has_index() ? Transport::nccl : transport_of(device);
}

const char* to_string(Transport e) {
  switch (e) {
    case Transport::threads_on_cpu: return "threads on a CPU";
    case Transport::threads_on_gpu: return "threads on a GPU";
    case Transport::mpi: return "MPI";
    case Transport::nccl: return "NCCL";
  }
  return "unknown";
}

// Least squares over the table of docs/performance.md, "Dispatchers". Between nodes nothing was
// measured: the links of an H100, 360 GB/s inside a node and 40 to others (docs/estimate.md).
DispatchRates dispatch_rates(Transport e) {
  constexpr double kBetween = 9;
  if (e == Transport::threads_on_gpu) return {0.93, 0.37, 1.77, 4.09, 1, true};
  return {0, 1, 1, 1, e == Transport::threads_on_cpu ? 1 : kBetween, false};
}

DispatchTimes dispatch_times(const DispatchRates& rates, const MeshShape& shape,
                             const RouterConfig& router) {
  const double rows = static_cast<double>(router.top_k), sent = (shape.ep - 1.0) / shape.ep;
  const int num_nodes = std::max(1, shape.num_nodes_of_ep());
  const double out = (num_nodes - 1.0) / num_nodes,  // the part of all rows that leaves its node
      inside = shape.ep / num_nodes;
  const auto moved = [&](double within, double between) {
    return rates.row + rates.sent_row * (within + rates.between * between);
  };
  const double gathers = rates.etp_row * (shape.etp - 1);
  return {.all_to_all = rows * (moved(sent - out, out) + gathers),
          .all_gather =
              rates.token * (shape.ep * shape.etp - num_nodes + rates.between * (num_nodes - 1)),
          .two_hops = num_nodes == 1 ? kNever
                                     : mean_nodes(router, num_nodes) * moved(0, out) +
                                           rows * (moved((inside - 1) / inside, 0) + gathers)};
}

std::string describe_choice(Transport e, const MeshShape& shape, const RouterConfig& router) {
  const DispatchRates rates = dispatch_rates(e);
  const auto ways = by_time(dispatch_times(rates, shape, router));
  std::ostringstream os;
  os.precision(2);
  os << ways[0].name << " on " << shape.describe() << ": it costs " << ways[0].time;
  for (std::size_t i = 1; i < ways.size(); ++i) os << ", " << ways[i].name << " " << ways[i].time;
  os << " (" << to_string(e) << ": "
     << (rates.is_measured ? "time, as measured" : "rows that a rank sends for each token") << ")";
  return os.str();
}

}  // namespace moesh::nn
