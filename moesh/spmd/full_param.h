#pragma once
// A parameter that is cut and stored in shards, as one tensor: for what looks at all of a matrix at
// once.

#include "moesh/spmd/param.h"

namespace moesh {

/// Joins what the ranks have of something shaped like the parameter (its value, its gradient, an
/// optimizer's state): over its storage and over `cuts`, some of the axes that cut it. With all of
/// w.cutting, as by default, it is the full tensor [w.spec.shape]. An axis that is left out keeps
/// its slice: with etp alone, a rank gets the full matrices of its own experts.
/// Every rank of the current mesh makes the call, also one whose shard is empty, and the replicas
/// get the same bits. Without autograd.
at::Tensor gather_full(const Stored& w, const at::Tensor& shard, Axes cuts);
at::Tensor gather_full(const Stored& w, const at::Tensor& shard);

/// The way back, without communication: this rank's shard of what gather_full gives, a view of it.
at::Tensor shard_of(const Stored& w, const at::Tensor& full, Axes cuts);
at::Tensor shard_of(const Stored& w, const at::Tensor& full);

}  // namespace moesh
