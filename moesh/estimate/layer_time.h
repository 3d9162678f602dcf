#pragma once
// How long the kernels of a training step take on a GPU, each for itself: from what was measured on
// an H200, and for other GPUs in proportion to their peaks. And how long a layer takes on a rank.

#include "moesh/estimate/cluster.h"
#include "moesh/estimate/estimate.h"
#include "moesh/estimate/profile.h"
#include "moesh/pipeline/simulate.h"

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

// How long a layer takes on a rank of a mesh in one micro-batch, forward and backward: its kernels,
// and what it sends, as far as nothing hides that.

/// Seconds of one micro-batch on a rank in one direction, by what goes on beside what.
struct DirectionTime {
  double before = 0;      // computing until rows go to their experts
  double at_experts = 0;  // with rows that have come there
  double after = 0;       // when they are home
  double between = 0,
         inside = 0;   // rows between nodes, and inside those of two hops
  double hidden = 0;   // of these, behind what another micro-batch computes
  double apart = 0;    // rows over etp, which nothing hides
  double tensor = 0;   // collectives of tp and cp
  double storage = 0;  // gathering parameters and reducing gradients, as far as it shows

  double compute() const { return before + at_experts + after; }
  double travel() const { return between + inside; }
  double rows() const { return travel() - hidden + apart; }
  double all() const { return compute() + rows() + tensor + storage; }
  void add(const DirectionTime& p, double times = 1) {
    before += times * p.before, at_experts += times * p.at_experts, after += times * p.after;
    between += times * p.between, inside += times * p.inside, hidden += times * p.hidden;
    apart += times * p.apart, tensor += times * p.tensor, storage += times * p.storage;
  }
};

/// Seconds of both directions, of a layer or of a stage.
struct LayerTime {
  DirectionTime forward, backward;
  Compute compute;     // of both, by kernels
  double again = 0;    // part of it: forward once more, in backward
  double weights = 0;  // part of backward: gradients of weights, which can be left for later

  void add(const LayerTime& p, double times = 1) {
    forward.add(p.forward, times), backward.add(p.backward, times);
    compute.add(p.compute, times);
    again += times * p.again, weights += times * p.weights;
  }
  double all() const { return forward.all() + backward.all(); }
  double between() const { return forward.between + backward.between; }
  double inside() const { return forward.inside + backward.inside; }
  double rows() const { return forward.rows() + backward.rows(); }
  double tensor() const { return forward.tensor + backward.tensor; }
  double storage() const { return forward.storage + backward.storage; }
};

/// Where micro-batches of a pipeline share gathered parameters, a step gathers them once.
bool shares_gathers(const Config& config, const MeshShape& mesh);

/// A step as far as the time of a layer depends on it.
struct LayerContext {
  const Config& config;
  const Cluster& cluster;
  MeshShape mesh;
  std::int64_t num_micro = 1;
  double in_pairs = 0;  // the part of the micro-batches which have another one beside them
  bool moves_parameters = true;

  // The last of an odd number has none.
  static double pairs(bool overlaps, const MeshShape& mesh, std::int64_t num_micro) {
    if (!overlaps || mesh.pp > 1 || mesh.ep * mesh.etp == 1) return 0;
    return static_cast<double>(num_micro / 2 * 2) / static_cast<double>(num_micro);
  }
  double gathers_of_each() const {
    return shares_gathers(config, mesh) ? 1 / static_cast<double>(num_micro) : 1;
  }
  bool gathers_again() const {
    return !shares_gathers(config, mesh) && (config.parallelism.fsdp_reshard_after_forward ||
                                             config.activation_checkpoint.mode == "full");
  }
};

LayerTime parts_of(const PartProfile& p, const LayerContext& s);
/// The part of what is around the layers that a stage has: the embedding, whose backward is one, or
/// the head, whose backward is in forward.
LayerTime parts_of_end(PartProfile ends, double part, bool is_first, const LayerContext& s);

/// Adds what a layer does in one direction. As many rows come home as go there in forward; the
/// others of backward go there with them. In forward their counts come first, for which the rank
/// waits, behind rows that are under way (their own time is among that of the rows).
void add_to(pipeline::Lane& lane, const DirectionTime& p, const DirectionTime& forward);
/// How much sooner two lanes end that take turns.
double gain_of_turns(const std::vector<pipeline::Lane>& lanes);

}  // namespace moesh::estimate
