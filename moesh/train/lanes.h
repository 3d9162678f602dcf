#pragma once
// Two micro-batches of a step at a time: while the rows of one travel to their experts or home, the
// other one computes (base/turns.h).

#include <c10/core/Device.h>

#include <functional>

#include "moesh/fsdp/step_state.h"

namespace moesh::train {

/// As many as compute in turn: one more would only need more memory.
constexpr int kNumLanes = 2;

/// f(lane, state) for each lane, in turns; the first in this thread with `state` itself. The thread
/// of another has this rank's mesh, device, stream, kernels, observers and checks.
void in_lanes(StepState& state, at::Device device,
              const std::function<void(int lane, StepState& state)>& f);

}  // namespace moesh::train
