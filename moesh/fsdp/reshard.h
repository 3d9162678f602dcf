#pragma once
// FSDP's memory, in a step (StepState): parameters that `use` gathers or casts within a scope are
// freed when the scope's forward is done, and gathered or cast again when its backward begins.
// Those of a block travel in one message (of each group and dtype), while the block before it is
// computed, in forward and in backward. The tensors that autograd saved stay the same objects;
// their storage is emptied and filled again. (Saved-tensor hooks, the other way to do it, exist in
// Python only.)

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "moesh/fsdp/param.h"

namespace moesh {

namespace raw {
struct Gathers;
struct Gathering;
/// One more micro-batch, or one less, takes everything that is gathered ahead: where several take
/// the same way through the model at once.
void add_taker(Gathering& gathering);
void remove_taker(Gathering& gathering);
at::Tensor enter_reshard(const at::Tensor& x, const std::shared_ptr<Gathers>& gathers);
at::Tensor leave_reshard(const at::Tensor& y, const std::shared_ptr<Gathers>& gathers);
}  // namespace raw

/// The gathers of one part of the model. While it lives, `use` in the current step stores its
/// gathers here.
class ReshardScope {
 public:
  /// `before` is that of the part before this one: its gathers start when backward of this one
  /// begins.
  explicit ReshardScope(std::shared_ptr<raw::Gathers> before = nullptr);
  ~ReshardScope();
  ReshardScope(const ReshardScope&) = delete;
  ReshardScope& operator=(const ReshardScope&) = delete;

  /// The input of that part: when backward has passed it, the gathers are freed for good.
  template <auto L>
  Tensor<L> enter(const Tensor<L>& x) {
    return assume<L>(raw::enter_reshard(x.local(), gathers_));
  }
  /// Its output: frees the gathers now; when backward comes back here, they are gathered again.
  template <auto L>
  Tensor<L> leave(const Tensor<L>& y) {
    return assume<L>(raw::leave_reshard(y.local(), gathers_));
  }

  const std::shared_ptr<raw::Gathers>& gathers() const { return gathers_; }

 private:
  std::shared_ptr<raw::Gathers> gathers_, outer_;
};

/// Starts the gathers of parameters that will be used next, so that they travel while other work is
/// done. `use` takes them from here, if the parameter has not been written since. Nothing outside
/// of a step.
void prefetch(const std::vector<const Stored*>& params);

/// Casts those of these parameters that this rank stores whole, all at once: `use` takes them from
/// here, if the parameter has not been written since. Nothing outside of a step.
void cast_ahead(const std::vector<const Stored*>& params);

/// Those of these weights that all micro-batches of a step use, once gathered or cast; nothing
/// where the step keeps none (StepState::keep_gathers).
void keep_gathered(const std::vector<const Stored*>& params);

namespace raw {
/// Called by `use`: the gathered shards, from a prefetch or gathered now, known to the ReshardScope
/// of the step if there is one.
at::Tensor gather_shards(const Stored& w, const std::shared_ptr<comm::Group>& group);
/// The same if one rank stores all of it: the value is cast (or decoded), and again in backward.
at::Tensor cast_value(const Stored& w);
}  // namespace raw

}  // namespace moesh
