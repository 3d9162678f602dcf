#pragma once
// Taking tokens to their experts and the results back. T on every axis in, T on every axis out;
// which way is taken depends on the configuration only, never on counts: a choice by counts would
// differ between ranks and hang.

#include <functional>

#include "moesh/nn/experts.h"
#include "moesh/nn/router.h"

namespace moesh::nn {

enum class Dispatcher {
  automatic,   // the one that moves fewer bytes
  local,       // ep = etp = 1: nothing moves
  all_to_all,  // rows go to the ranks of their experts (K rows a token), and are gathered over etp
  all_gather,  // all tokens go to all ranks of ep x etp (one row a token), which reduce their
               // shares
};

const char* to_string(Dispatcher d);

/// The dispatcher that `automatic` stands for on this mesh; throws Error (config) when `local` is
/// asked for and ep x etp > 1.
Dispatcher resolve(Dispatcher asked, const MeshShape& shape, std::int64_t top_k);

/// local, all_to_all or all_gather over ep x etp. `meanwhile` is called while rows are on their
/// way.
PerToken dispatch(Dispatcher way, const Experts& experts, const PerToken& x_ND, const Route& route,
                  const Tokens& tokens, const std::function<void()>& meanwhile);

}  // namespace moesh::nn
