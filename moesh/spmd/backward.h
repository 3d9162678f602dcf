#pragma once
#include "moesh/base/error.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

/// Runs backward from a scalar loss that is P or I on every axis: a seed of 1 on each rank is right
/// for these alone.
template <auto L>
void backward(const Tensor<L>& loss) {
  [[maybe_unused]] constexpr auto checked = check_loss(L);
  MOESH_CHECK(loss.local().numel() == 1, ErrorKind::config, "backward of a loss with ",
              loss.local().numel(), " elements; sum it first (sum_all)");
  raw::run_backward([&] { loss.local().backward(); });
}

/// The gradient of a leaf, with the placement that follows from its own.
template <auto L>
Tensor<adjoint(L)> grad(const Tensor<L>& leaf) {
  MOESH_CHECK(
      leaf.local().grad().defined(), ErrorKind::config,
      "this tensor has no gradient: it needs requires_grad (as_leaf) and a backward that reaches it");
  return assume<adjoint(L)>(leaf.local().grad());
}

/// A leaf of the graph with this value, whose gradient `grad` reads after `backward`.
template <auto L>
Tensor<L> as_leaf(const Tensor<L>& x) {
  return assume<L>(x.local().detach().clone().requires_grad_(true));
}

}  // namespace moesh
