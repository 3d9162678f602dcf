#pragma once
// The norm of the gradients of all parameters, of both views of the mesh.

#include "moesh/optim/params.h"
#include "moesh/spmd/tensor.h"

namespace moesh::optim {

using Norm = Tensor<Dense{Place::I, Place::I, Place::I}>;

/// The 2-norm, a scalar in float64. Every element of every parameter counts once: where ranks hold
/// the same shard, the first of them counts it. So one all_reduce over the world sums all layouts,
/// every rank gets the same bits even if replicas have drifted apart, and a gradient that is not
/// finite on one rank, replica or not, makes the norm not finite on all.
Norm grad_norm(const ParamList& params);

/// Whether every gradient on every rank is finite: if not, all ranks skip the step. A norm that
/// overflows float64 counts as not finite.
bool all_finite(const Norm& norm);
bool all_finite(const ParamList& params);

}  // namespace moesh::optim
