#pragma once
// How long an optimizer step would take on a cluster: compute, communication that nothing hides,
// the bubble of the pipeline, the update; and which meshes are the fastest.

#include <functional>
#include <optional>
#include <string>

#include "moesh/estimate/cluster.h"
#include "moesh/estimate/layer_time.h"
#include "moesh/estimate/profile.h"
#include "moesh/pipeline/simulate.h"
#include "moesh/pipeline/stage_plan.h"

namespace moesh::estimate {

/// What of a step is data and not the model's or the mesh's: the schedule of a pipeline by its name
/// (without pp it does not matter), and parallelism.overlap_experts.
struct Order {
  std::string schedule = "1f1b";
  bool overlap_experts = false;
};
Order order_of(const Config& config);

struct StepTime {
  MeshShape mesh;
  std::string schedule, recompute;  // pipeline_parallel_schedule, activation_checkpoint.mode
  std::int64_t batch_size = 1;      // sequences of a micro-batch, on a data-parallel rank
  std::int64_t num_tokens = 0, num_micro_batches = 1;  // of a step
  pipeline::StagePlan layers;                          // of each stage
  bool overlap_experts = false;
  std::string dispatcher;  // parallelism.moe_dispatcher
  // Seconds of a step. The first five are those of the rank that works longest, and add up to
  // `total` with what it waits for others.
  double compute = 0, tensor = 0, experts = 0, storage = 0, update = 0;
  double bubble = 0;  // waiting, and sending to the next stage
  // Parts of `compute`: by kernels, what forward computes once more, and embedding, head and loss.
  Compute kernels;
  double again = 0, ends = 0;
  /// The part of the time before the update in which ranks of pp wait, all of them together.
  double waiting = 0;
  double total = 0;
  double peak = 0;        // bytes of the rank that holds the most
  double flops = 0;       // of the model in a step, on all ranks; recompute is not counted
  double peak_flops = 0;  // of a GPU, each second

  double tokens_per_second() const { return static_cast<double>(num_tokens) / total; }
  double flops_of_a_rank() const { return flops / total / mesh.num_ranks(); }
};

/// As --json has it.
formats::JsonValue to_json(const StepTime& t);

/// Throws Error (config) unless the mesh has all GPUs of the cluster.
void check_fills(const MeshShape& mesh, const Cluster& cluster);

/// The plan of the stages is that of the configuration.
StepTime step_time(Profiler& profiler, const Cluster& cluster, const MeshShape& mesh,
                   const Order& order);

/// For a search: nothing where it would not have more than `least` tokens a second even if
/// parameters and gradients moved in no time. The peak is that of the whole step only where it is
/// within `limit` and the step faster than `least`: else less is measured.
std::optional<StepTime> step_time_above(Profiler& profiler, const Cluster& cluster,
                                        const MeshShape& mesh, const Order& order, double least,
                                        double limit);

/// The simulated schedule of such a step, in seconds, with no more than `most` micro-batches.
pipeline::Simulation simulated(Profiler& profiler, const Cluster& cluster, const MeshShape& mesh,
                               const Order& order, int most);

/// Tokens a second that no mesh which splits layers like this one exceeds, whatever its pp and dp:
/// without a bubble, with parameters and gradients moved in no time, and with rows that travel
/// behind all of the compute. `with_any_ep`: nor one that splits the experts besides.
double fastest_tokens_per_second(Profiler& profiler, const Cluster& cluster, const MeshShape& mesh,
                                 bool with_any_ep = false);

}  // namespace moesh::estimate
