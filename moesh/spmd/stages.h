#pragma once
// What goes from a stage of a pipeline to another. pp is not part of a layout: a rank talks to
// those ranks of pp which have its own place on all other axes, and both ends know sizes and type.
// A gradient comes back as the adjoint of what was sent.

#include "moesh/comm/mesh.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

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

/// x as a stage takes it: the graph of what comes after begins here, and backward leaves the
/// gradient for the stage before. Nobody else writes x.
template <auto L>
Tensor<L> as_input(const Tensor<L>& x) {
  return assume<L>(x.local().detach().requires_grad_(true));
}

/// Backward of a stage: from the gradient of what it gave to the next one, and from its own losses;
/// undefined: it has none.
template <auto L, auto Loss>
void backward(const Tensor<L>& out, const Tensor<adjoint(L)>& gradient,
              const Tensor<Loss>& own_losses) {
  [[maybe_unused]] constexpr auto checked = check_loss(Loss);
  raw::backward({out.local(), own_losses.local()}, {gradient.local(), {}});
}

}  // namespace moesh
