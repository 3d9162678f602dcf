#pragma once
// State that lives for one step: parameters that are on their way or shared by micro-batches,
// sums of gradients that are under way, gradients of weights that are left for later, and what a
// recompute keeps. Nodes of autograd hold what their backward needs of it.

#include <cstdint>
#include <memory>
#include <vector>

#include "moesh/base/scoped_value.h"
#include "moesh/fsdp/param.h"
#include "moesh/spmd/weights_later.h"

namespace moesh {

namespace raw {
struct Gathering;
struct Gathers;
struct Reductions;
struct Results;
}  // namespace raw

/// Bytes of gathered parameters that are in a ReshardScope or under way: now, and the most so far.
struct GatherBytes {
  std::int64_t now = 0, most = 0;
};

/// The code that runs a step makes one, and what it calls on this thread takes part in it. Without
/// one, parameters are gathered when they are used and kept for backward, and sums are awaited at
/// once.
class StepState {
 public:
  /// Whether sums of gradients are started in backward and not waited for: those of one bucket
  /// together. Every rank has the same buckets, and starts and awaits them in the same order. The
  /// sums have the same bits as without it; but under NCCL, whose order of terms depends on the
  /// place in a message, and for a parameter that is used twice (a tied embedding), of which
  /// several micro-batches are added one use after the other, those of another order.
  explicit StepState(bool overlap = false);
  /// For another thread of the same rank, which works on a micro-batch of the same step (turns.h):
  /// what it gathers, sums and leaves is that of `whole`, which outlives it. Before the
  /// first gather of the step raw::add_taker says that there is one; it ends with this object.
  explicit StepState(StepState* whole);
  ~StepState();

  /// The innermost of this thread; null: none.
  static StepState* current();

  /// The gradients that backward has left since the last bucket are one, too.
  void start_sums();
  /// Awaits all of them, and adds each to the gradient of its parameter.
  void finish_sums();

  /// From now on backward leaves the gradients of weights for later (weights_later.h).
  void leave_weights();
  /// The work that backward has left since the last call.
  WeightHalf take_weights();
  /// At the end of a step: throws Error (internal) where some of it was never done.
  void finish_weights();

  /// From now on what keep_gathered (reshard.h) names is gathered once for all micro-batches. Where
  /// blocks do not free their parameters, several micro-batches of a pipeline are under way at
  /// once, and each would have gathered its own.
  void keep_gathers();

  GatherBytes bytes() const;
  void reset_bytes();

  // For the parts of this folder.
  std::shared_ptr<raw::Gathering> gathering;    // reshard.cpp
  std::shared_ptr<raw::Reductions> reductions;  // reduce.cpp; null: sums are awaited at once
  std::shared_ptr<WeightsLater> weights_later;  // null: they come with backward
  raw::Results* results = nullptr;              // recompute.cpp: of the run that goes on
  std::shared_ptr<raw::Gathers> scope;          // reshard.cpp: where `use` puts what it gathers

 private:
  ScopedValue<StepState*> scope_;
  bool is_whole_ = true;
};

}  // namespace moesh
