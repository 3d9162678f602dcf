#pragma once
// The differentiable collectives behind the typed ones. Plain tensors and run-time placements:
// nothing here is checked by the compiler, so only the typed headers of this folder call it.

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "moesh/comm/mesh.h"
#include "moesh/types/transition.h"

namespace moesh {

/// Along which dimension a tensor is cut, and how. By itself a dimension means: gathers join equal
/// parts, cuts make pieces of ceil(size / ranks). `total` gives the whole size (pieces of
/// ceil(total / ranks)), `sizes` any parts at all.
struct Along {
  std::int64_t dim;
  std::int64_t total = -1;
  std::vector<std::int64_t> sizes = {};
};

namespace raw {

/// Takes x from one placement to another on the axes; backward takes the gradient between the
/// adjoints.
at::Tensor move(const at::Tensor& x, Axes axes, Place from, Place to, const Along& along,
                const char* what);

/// R or I -> P: kept on the first rank of the axes, zero elsewhere. Backward: the same from R,
/// identity from I.
at::Tensor once(const at::Tensor& x, Axes axes, Place from);

/// Rows of one or more tensors to other ranks in one message (together.h), under way; backward
/// sends the gradients back in one.
class RowExchange {
 public:
  RowExchange(std::vector<at::Tensor> xs, Axes axes, std::vector<std::int64_t> send,
              std::vector<std::int64_t> recv);
  std::vector<at::Tensor> wait();

 private:
  std::vector<at::Tensor> xs_;
  std::shared_ptr<comm::Group> group_;
  std::vector<std::int64_t> send_, recv_;
  comm::Handle handle_;
};

/// One step, without autograd.
at::Tensor run(Step step, const at::Tensor& x, comm::Group& group, std::int64_t dim,
               const std::vector<std::int64_t>& sizes);

}  // namespace raw
}  // namespace moesh
