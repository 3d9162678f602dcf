#pragma once
// Taking tokens to their experts and the results back. T on every axis in, T on every axis out;
// which way is taken depends on the configuration only, never on counts: a choice by counts would
// differ between ranks and hang. One file in nn/dispatch/ for each way.

#include <array>
#include <memory>

#include "moesh/nn/dispatch_time.h"
#include "moesh/nn/experts.h"
#include "moesh/nn/mlp.h"
#include "moesh/nn/router.h"

namespace moesh::nn {

/// What a configuration may ask for.
enum class Dispatcher {
  automatic,   // the one that takes less time, or moves fewer rows where none was measured
  local,       // ep = etp = 1: nothing moves
  all_to_all,  // rows go to the ranks of their experts (K rows a token), and are gathered over etp
  all_gather,  // all tokens go to all ranks of ep x etp (one row a token), and outputs are summed
};

inline constexpr std::array kDispatchers{Dispatcher::automatic, Dispatcher::local,
                                         Dispatcher::all_to_all, Dispatcher::all_gather};
const char* to_string(Dispatcher d);

/// The dispatcher that `automatic` stands for on this mesh; throws Error (config) when `local` is
/// asked for and ep x etp > 1.
Dispatcher resolve(Dispatcher asked, const MeshShape& shape, std::int64_t top_k, Exchange exchange);

/// What a MoE layer computes with.
struct DispatchInput {
  const Experts& experts;
  const Mlp* shared;     // the shared experts, or null
  const PerToken& x_ND;  // this rank's own tokens: those of the route
  const Route& route;
  const Tokens& tokens;
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
std::unique_ptr<const Dispatch> make_dispatch(Dispatcher way, const MeshShape& shape);

}  // namespace moesh::nn
