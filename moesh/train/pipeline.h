#pragma once
// A step's forwards and backwards, as a schedule orders them: the stages of this rank, and what
// goes between them and those of other ranks. Without pp the schedule is a forward and a backward
// of each micro-batch.

#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <vector>

#include "moesh/fsdp/step_state.h"
#include "moesh/models/model.h"
#include "moesh/pipeline/schedule.h"

namespace moesh::train {

/// What a schedule is made of besides pp and the micro-batches of a step.
struct PipelineOptions {
  std::string schedule = "1f1b";
  int stages_of_a_rank = 1;
  // Two micro-batches are under way at once, and one computes while rows of the other go to their
  // experts or home: without pp one after the other of a step, with pp those of joined actions.
  bool overlap_experts = false;
};

/// The schedule of so many ranks of pp, for this many micro-batches; and of those of the current
/// mesh.
pipeline::Schedule schedule_of(const PipelineOptions& options, int num_ranks,
                               std::size_t num_micro_batches);
pipeline::Schedule schedule_of(const PipelineOptions& options, std::size_t num_micro_batches);

/// Makes the ways for messages between the stages. Every rank of the current mesh calls it, before
/// the first step.
void open_channels(const models::Model& model, const PipelineOptions& options);

/// What the forward of a stage has given for a micro-batch.
using OnForward = std::function<void(const pipeline::Action&, const models::ForwardResult&)>;

/// The actions of this rank. `state` is the current one of this thread; null: there is no backward
/// in the schedule. Throws Error which names the action, where there are several ranks.
void run_pipeline(models::Model& model, const std::vector<models::MicroBatch>& batches,
                  const models::ForwardOptions& options, const pipeline::Schedule& schedule,
                  StepState* state, const OnForward& on_forward, bool overlap_experts = false);

/// Where the last stage has the embedding as well (as its head, or for multi-token prediction) and
/// both ends are on ranks of their own: each adds the other's gradient to its own.
void add_tied_gradients(models::Model& model, const pipeline::Schedule& schedule);

// Two micro-batches of a step at a time: while the rows of one travel to their experts or home, the
// other one computes (base/turns.h).

/// As many as compute in turn: one more would only need more memory.
constexpr int kNumLanes = 2;

/// f(lane, state) for each lane, in turns; the first in this thread with `state` itself. The thread
/// of another has this rank's mesh, device, stream, kernels, observers and checks.
void in_lanes(StepState& state, at::Device device,
              const std::function<void(int lane, StepState& state)>& f);

}  // namespace moesh::train
