#pragma once
#include <memory>

#include "moesh/base/error.h"
#include "moesh/comm/mesh.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

/// Runs backward from a scalar loss that is P or I on every axis: a seed of 1 on each rank is right
/// only for these.
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

// Tensors that go from one stage of a pipeline to another. pp is not part of a layout: a rank
// exchanges messages with the ranks of pp that have its own place on all other axes, and both ends
// know sizes and type. The gradient of a sent tensor comes back.

/// A message to rank `to` of pp; `label` is compared with that of the receiver.
template <auto L>
comm::Handle start_send(const Tensor<L>& x, int to, std::int64_t label) {
  return current_mesh().group(pp)->start_send(x.local().detach(), to, label);
}

/// A message that is on its way here.
template <auto L>
class [[nodiscard]] Arriving {
 public:
  Arriving(at::IntArrayRef sizes, const at::TensorOptions& options, int from, std::int64_t label)
      : handle_(current_mesh().group(pp)->start_recv(sizes, options, from, label)) {}
  Tensor<L> wait() { return assume<L>(handle_.wait()); }

 private:
  comm::Handle handle_;
};

/// x as the input of a stage: the graph of the stage begins here, and backward leaves the gradient
/// for the stage before. x is not written elsewhere.
template <auto L>
Tensor<L> as_input(const Tensor<L>& x) {
  return assume<L>(x.local().detach().requires_grad_(true));
}

/// The output of a stage, as its backward knows it: where its gradient goes. The values were for
/// the next stage, and are freed when they have gone there.
template <auto L>
class OutputEdge {
 public:
  OutputEdge() = default;
  explicit OutputEdge(const Tensor<L>& x) : edge_(raw::gradient_edge(x.local())) {}
  const raw::GradientEdge& edge() const { return *edge_; }

 private:
  std::shared_ptr<const raw::GradientEdge> edge_;
};

/// Backward of a stage: from the gradient of its output, and from its own losses; undefined: it has
/// none.
template <auto L, auto Loss>
void backward(const OutputEdge<L>& out, const Tensor<adjoint(L)>& gradient,
              const Tensor<Loss>& own_losses) {
  [[maybe_unused]] constexpr auto checked = check_loss(Loss);
  raw::backward(out.edge(), gradient.local(), own_losses.local());
}

}  // namespace moesh
