#pragma once
// The differentiable collectives behind the typed ones. Plain tensors and run-time placements:
// nothing here is checked by the compiler, so only the typed headers of this folder call it.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "moesh/comm/mesh.h"
#include "moesh/spmd/codec.h"
#include "moesh/types/transition.h"

namespace moesh {

/// Along which dimension a tensor is cut, and how. By itself a dimension means: gathers join equal
/// parts, cuts make pieces of ceil(size / ranks). `total` gives the whole size (pieces of
/// ceil(total / ranks)), `sizes` any parts at all.
struct SplitDim {
  std::int64_t dim;
  std::int64_t total = -1;
  std::vector<std::int64_t> sizes = {};
};

namespace raw {

using Tensors = std::vector<at::Tensor>;

/// A linear step between ranks that was started: the message on its way, and a function that turns
/// it into the results.
struct SentStep {
  comm::Handle message;
  std::function<Tensors(const at::Tensor& message)> results;

  Tensors wait() { return results(message.wait()); }
};
/// Such a step, without autograd.
using Begin = std::function<SentStep(const Tensors& xs)>;

/// A step and its adjoint. Nothing: a group of one rank, where tensors stay as they are.
struct AdjointPair {
  Begin step, adjoint;
  /// The sizes of the step's result: a step of what is not computed (attach.h) sends nothing.
  std::function<std::vector<std::int64_t>(at::IntArrayRef sizes)> sizes;

  SentStep begin(const Tensors& xs) const;
};
using MaybeAdjointPair = std::optional<AdjointPair>;

/// The pair, whose step sends these codes in the place of the tensors that stand for them, and
/// leaves there what came; and whose adjoint sends its gradients by the codec.
MaybeAdjointPair in_code(MaybeAdjointPair pair, const std::shared_ptr<Codes>& codes,
                         const Codec& back);

/// Starts the step and awaits it; backward does the same with the adjoint.
Tensors run_pair(const Tensors& xs, const MaybeAdjointPair& pair);

/// Start and wait as two calls, with other work in between. Backward starts the adjoint where
/// `wait` was called, and awaits it where this object was made, so the same work is in between.
/// Before either wait another piece of work of this rank takes its turn (base/turns.h).
class StartedStep {
 public:
  StartedStep(Tensors xs, const MaybeAdjointPair& pair);
  /// Once.
  Tensors wait();

 private:
  // The collectives that backward has started.
  struct Backward {
    Begin begin;
    std::optional<SentStep> sent;
  };

  Tensors xs_;
  std::optional<SentStep> sent_;
  std::shared_ptr<Backward> backward_;  // null: no x has a gradient
  at::Tensor under_way_;                // stands for the xs in the graph
  bool is_awaited_ = false;
};

/// x from one placement to another on the axes; the adjoint takes the gradient between the adjoint
/// placements.
MaybeAdjointPair move(const at::Tensor& x, Axes axes, Place from, Place to, const SplitDim& along,
                      const char* what);

/// Rows of one or more tensors to other ranks in one message (rows.h), and back.
MaybeAdjointPair move_rows(const at::Tensor& first, Axes axes,
                           const std::vector<std::int64_t>& send,
                           const std::vector<std::int64_t>& recv);

/// R or I -> P: kept on the first rank of the axes, zero elsewhere. Backward: the same from R,
/// identity from I.
at::Tensor once(const at::Tensor& x, Axes axes, Place from);

/// One step, without autograd: begun, and in one.
SentStep begin(Step step, const at::Tensor& x, comm::Group& group, std::int64_t dim,
               const std::vector<std::int64_t>& sizes);
at::Tensor run(Step step, const at::Tensor& x, comm::Group& group, std::int64_t dim,
               const std::vector<std::int64_t>& sizes);

}  // namespace raw
}  // namespace moesh
