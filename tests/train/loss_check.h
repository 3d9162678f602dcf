#pragma once
// A training step's loss terms against their formulas (tests/nn/loss_reference.h).

#include <string>

#include "tests/nn/loss_reference.h"

namespace moesh::losses {

/// Two micro-batches of a small model on a mesh, with labels as the mask says: "", or the first of
/// cross-entropy, expert counts and auxiliary losses that is not its formula, computed from the
/// logits of all ranks.
std::string step_complaint(const MeshShape& shape, Mask mask, bool sequence_parallel);

}  // namespace moesh::losses
