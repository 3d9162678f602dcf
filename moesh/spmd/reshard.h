#pragma once
// FSDP's memory: parameters that `use` gathers within a scope are freed when the scope's forward is
// done, and gathered again when its backward begins. The tensors that autograd saved stay the same
// objects; their storage is emptied and filled again. (Saved-tensor hooks, the other way to do it,
// exist in Python only.)

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "moesh/spmd/param.h"

namespace moesh {

namespace raw {
struct GatheredBlock;
}

/// The gathers of one block. While it lives, `use` on this thread puts its gathers here.
class ReshardScope {
 public:
  ReshardScope();
  ~ReshardScope();
  ReshardScope(const ReshardScope&) = delete;
  ReshardScope& operator=(const ReshardScope&) = delete;

  /// The block's input: when backward has passed it, the gathers are freed for good.
  at::Tensor enter(const at::Tensor& x);
  /// The block's output: frees the gathers now; when backward comes back here, they are gathered
  /// again.
  at::Tensor leave(const at::Tensor& y);

 private:
  std::shared_ptr<raw::GatheredBlock> block_;
  std::shared_ptr<raw::GatheredBlock> outer_;
};

/// Starts the gathers of parameters that will be used next, so that they travel while other work is
/// done. `use` takes them from here, if the parameter has not been written since.
void prefetch(const std::vector<const Stored*>& params);

/// Bytes of gathered parameters on this thread that are in a scope or under way: now, and the most
/// since the last reset.
struct GatherBytes {
  std::int64_t now = 0, most = 0;
};
GatherBytes gather_bytes();
void reset_gather_bytes();

namespace raw {
/// Called by `use`: the gathered shards, from a prefetch or gathered now, known to the scope of
/// this thread if there is one.
at::Tensor gather_shards(const Stored& w, at::ScalarType compute,
                         const std::shared_ptr<comm::Group>& group);
}  // namespace raw

}  // namespace moesh
