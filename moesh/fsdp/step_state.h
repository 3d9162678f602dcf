#pragma once
// State that lives for one step: parameters that are being gathered or that all micro-batches use,
// sums of gradients in progress, gradients of weights that are left for later, and values that a
// recompute keeps. Nodes of autograd hold the parts that their backward needs.

#include <cstdint>
#include <memory>

#include "moesh/base/this_thread.h"
#include "moesh/fsdp/float8_counts.h"
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

/// The code that runs a step makes one, and everything that it calls on this thread uses it.
/// Without one, parameters are gathered when they are used and kept for backward, and sums are
/// awaited at once.
class StepState {
 public:
  /// `overlap`: sums of gradients are started in backward, one bucket at a time, and not awaited
  /// there. Every rank has the same buckets, and starts and awaits them in the same order. The sums
  /// have the same bits as without it, with two exceptions where terms are added in another order:
  /// under NCCL, where the order depends on the place in a message, and for a parameter that is
  /// used twice (a tied embedding) in several micro-batches.
  explicit StepState(bool overlap = false);
  /// For another thread of the same rank, which works on a micro-batch of the same step (turns.h):
  /// its gathers, sums and weights for later belong to `whole`, which outlives it.
  explicit StepState(StepState* whole);
  ~StepState();

  /// The innermost of this thread; null: none.
  static StepState* current();

  /// Makes a bucket of the gradients that backward has left since the last one.
  void start_sums();
  /// Awaits all of them, and adds each to the gradient of its parameter.
  void finish_sums();

  /// From now on backward leaves the gradients of weights for later (weights_later.h).
  void leave_weights();
  /// The work that backward has left since the last call.
  WeightHalf take_weights();
  /// While the result lives, backward leaves nothing for later.
  WeightsLater::AtOnce weights_at_once() const;
  /// At the end of a step: throws Error (internal) where some of it was never done.
  void finish_weights();

  /// From now on the parameters that keep_gathered (reshard.h) names are gathered once for all
  /// micro-batches. If blocks do not free their parameters, several micro-batches of a pipeline are
  /// in progress at once, and each would gather its own copy.
  void keep_gathers();

  GatherBytes bytes() const;
  void reset_bytes();

  std::shared_ptr<StepFloat8Counts> float8_counts;  // null: nobody counts codes of float8

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
