#include "moesh/fsdp/step_state.h"

#include "moesh/fsdp/reduce.h"
#include "moesh/fsdp/reshard.h"

namespace moesh {
namespace {

// A rank is a thread, and layers call use(w): they know nothing of steps.
thread_local StepState* innermost = nullptr;

}  // namespace

StepState::StepState(bool overlap)
    : gathering(raw::make_gathering()),
      reductions(overlap ? raw::make_reductions() : nullptr),
      scope_(innermost, this) {}
StepState::StepState(StepState* whole)
    : float8_counts(whole->float8_counts),
      gathering(whole->gathering),
      reductions(whole->reductions),
      weights_later(whole->weights_later),
      scope_(innermost, this),
      is_whole_(false) {}
StepState::~StepState() {
  if (is_whole_) raw::forget(*gathering);
}

StepState* StepState::current() { return innermost; }

void StepState::leave_weights() { weights_later = std::make_shared<WeightsLater>(); }
WeightHalf StepState::take_weights() {
  return weights_later ? weights_later->take() : WeightHalf();
}
WeightsLater::AtOnce StepState::weights_at_once() const {
  return weights_later ? weights_later->at_once() : WeightsLater::AtOnce();
}
void StepState::finish_weights() {
  if (weights_later) weights_later->finish();
}

}  // namespace moesh
