#pragma once
// How long the kernels of a training step take on a GPU, each for itself: from what was measured on
// an H200, and for other GPUs in proportion to their peaks.

#include "moesh/estimate/cluster.h"
#include "moesh/estimate/estimate.h"

namespace moesh::estimate {

using kernels::meta::KernelWork, kernels::meta::WorkKind, kernels::meta::WorkLedger;

/// Seconds of a kernel, on a GPU that does nothing else.
double seconds(const KernelWork& work, const Cluster& gpu);
/// The seconds of a pass over so many bytes of parameters.
double seconds_of_large_pass(double bytes, const Cluster& gpu);

/// Seconds of a GPU, by what it does.
struct Compute {
  double experts = 0, attention = 0, dense = 0, passes = 0;
  double moving = 0;  // part of the passes: rows to their experts in memory, and back

  double all() const { return experts + attention + dense + passes; }
  /// What may be done only when rows have come to their experts.
  double at_experts() const { return experts + moving; }
  void add(const Compute& c, double times = 1);
};
/// `part_of_step` counts of what a step does once.
Compute compute_of(const WorkLedger& work, const Cluster& gpu, double part_of_step = 1);

/// The products that give the gradients of weights: as many as in forward, and never in float8.
double seconds_of_weight_gradients(const WorkLedger& forward, const Cluster& gpu);

/// What products of experts take at least, however many rows an expert has.
double least_seconds_of_experts(const PassWork& work, const Cluster& gpu);

/// A GPU computes this much slower while rows travel: the part of its multiprocessors that moves
/// them.
extern const double kPartThatMoves;

}  // namespace moesh::estimate
