#pragma once
// How evenly a route loads the experts.

#include <ATen/ATen.h>

#include <algorithm>

#include "moesh/nn/router.h"
#include "moesh/spmd/transitions.h"

namespace moesh::nn {

struct RouterStatistics {
  at::Tensor counts_E;    // over all ranks
  double entropy;         // of the load, in nats
  double max_over_mean;   // 1 is perfect balance
  std::int64_t num_idle;  // experts without tokens
};

/// Summed over all ranks.
inline RouterStatistics statistics(const Route& route) {
  const at::NoGradGuard no_grad;
  const at::Tensor counts = whole(all_reduce<kTokenAxes>(route.counts_E)).cpu();
  const at::Tensor load = counts.to(at::kDouble) / std::max<double>(1, counts.sum().item<double>());
  return {.counts_E = counts,
          .entropy = -load.xlogy(load).sum().item<double>(),
          .max_over_mean = load.max().item<double>() * static_cast<double>(counts.numel()),
          .num_idle = counts.eq(0).sum().item<std::int64_t>()};
}

}  // namespace moesh::nn
