#pragma once
// Takes tokens to their experts, and the results back. T on every axis in, T on every axis out. The
// choice of a dispatcher depends on the configuration only, never on counts: a choice by counts
// would differ between ranks and hang. The dispatchers are in dispatchers.cpp.

#include <c10/core/Device.h>

#include <array>
#include <memory>
#include <optional>
#include <string>

#include "moesh/comm/mesh.h"
#include "moesh/nn/experts.h"
#include "moesh/nn/router.h"

namespace moesh::nn {

// How long each dispatcher takes, as bench_dispatchers measured it on each backend: `auto` chooses
// by these times. They depend on the configuration and on how the program was started, which are
// the same for every rank.

/// The ways in which rows travel from rank to rank.
enum class Transport { threads_on_cpu, threads_on_gpu, mpi, nccl };

/// The transport between ranks on this device, in a program that was started like this one.
Transport transport_of(at::Device device);
/// The transport of a run that is planned here and started elsewhere: a GPU without an index
/// belongs to one rank, under a launcher.
Transport planned_exchange(at::Device device);
const char* to_string(Transport e);

/// The mean number of nodes on which a token has experts, if all choices that the router may make
/// are equally likely.
double mean_nodes(const RouterConfig& router, int num_nodes);

/// Forward and backward, in milliseconds for the size that was measured: only ratios matter.
struct DispatchRates {
  double row;        // sorting and combining each of the K rows of a token
  double sent_row;   // and taking it to the rank of its expert and back
  double etp_row;    // gathering it on one more etp rank, and summing the results
  double token;      // all_gather: a token on one more rank, and summing the results
  double between;    // times that a row takes between nodes, of that inside one
  bool is_measured;  // if not: every row that is sent counts the same
};
DispatchRates dispatch_rates(Transport e);

/// Without what all have in common (experts, router). two_hops: infinite where ep is on one node,
/// or nodes do not share it evenly.
struct DispatchTimes {
  double all_to_all, all_gather, two_hops;
};
DispatchTimes dispatch_times(const DispatchRates& rates, const MeshShape& shape,
                             const RouterConfig& router);

/// The reason for the choice of `auto`, for a log: "all_gather on tp=2 ep=2: it costs
/// 4.1, all_to_all 6.7 (threads on a GPU: ...)".
std::string describe_choice(Transport e, const MeshShape& shape, const RouterConfig& router);

/// The values that a configuration may have.
enum class Dispatcher {
  automatic,   // the one that takes less time, or moves fewer rows where none was measured
  local,       // ep = etp = 1: nothing moves
  all_to_all,  // rows go to the ranks of their experts (K rows a token), and are gathered over etp
  all_gather,  // all tokens go to all ranks of ep x etp (one row a token), and outputs are summed
  two_hops,    // once to each node that has one of a token's experts, then as all_to_all inside it
};

inline constexpr std::array kDispatchers{Dispatcher::automatic, Dispatcher::local,
                                         Dispatcher::all_to_all, Dispatcher::all_gather,
                                         Dispatcher::two_hops};
const char* to_string(Dispatcher d);

/// The dispatcher that `automatic` stands for on this mesh; throws Error (config) when `local` is
/// asked for and ep x etp > 1, or `two_hops` where nodes do not share ep evenly.
Dispatcher resolve(Dispatcher asked, const MeshShape& shape, const RouterConfig& router,
                   Transport exchange);

/// The dispatch of a MoE layer.
struct DispatchInput {
  const Experts& experts;
  const SharedExperts* shared;  // null: there are none
  PerToken x_ND;                // this rank's own tokens: those of the route
  const Route& route;
  const Tokens& tokens;
  /// In a recompute: the gradient of what the routed experts give, which rows of tokens may take
  /// along.
  std::optional<PerToken> dy_ND;
  /// What routed experts get of tokens and of gradients, and in which form these travel.
  Codec codec;
};

/// One way to compute routed and shared experts. x is the stream [tokens, D]: with sequence
/// parallelism this rank's own tokens, without it all tokens of its tp ranks.
class Dispatch {
 public:
  virtual ~Dispatch() = default;
  virtual Stream<true> operator()(const DispatchInput& in, const Stream<true>& x_ND) const = 0;
  virtual Stream<false> operator()(const DispatchInput& in, const Stream<false>& x_ND) const = 0;
};

/// `way` is one that `resolve` gave for this mesh. Where ep x etp are the tp ranks themselves,
/// all_gather shares its gather and its reduction with the shared experts.
std::unique_ptr<const Dispatch> make_dispatch(Dispatcher way, const MeshShape& shape,
                                              const RouterConfig& router);

/// How the flat tokens [N, D] inside the layer are cut over tp.
SplitDim rows_over_tp(const Tokens& tokens);

}  // namespace moesh::nn
