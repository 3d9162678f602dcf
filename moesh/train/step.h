#pragma once
// One optimizer step: the gradients of all micro-batches, their norm, the update, the expert bias.
// The host queues all of it on the device without waiting, and then reads the results once.

#include <array>
#include <optional>
#include <vector>

#include "moesh/models/model.h"
#include "moesh/nn/tokens.h"
#include "moesh/optim/optimizer.h"
#include "moesh/optim/params.h"
#include "moesh/train/pipeline.h"

namespace moesh::train {

struct StepOptions {
  double max_norm = 1;        // of the gradient; 0: not clipped
  double bias_coeff = 0.001;  // by how much the expert bias moves; 0: it stays
  double qk_clip = 0;         // largest logit of attention; 0: not clipped
  bool overlap = true;        // gradients are summed over the ranks while backward goes on
  PipelineOptions pipeline;
  models::ForwardOptions forward;
  std::int64_t float8_layers = 0;  // whose codes can be counted; 0: nothing is in float8
  bool counts_float8 = false;      // in this step
  bool probe_waits = true;  // forward.probe reads what the device has: no step is a CUDA graph
};

/// Results of a step on the device, not read yet.
struct UnreadStep {
  at::Tensor sums;    // float64: valid tokens, cross-entropy, total loss, checks that failed, the
                      // auxiliary losses if there are any, then the counts of each MoE layer, then
                      // those of codes of float8 if they are counted; of all ranks
  at::Tensor update;  // float64: gradient norm, skipped, the largest logit if it is known, then the
                      // least and the largest expert bias of each MoE layer; undefined before the
                      // update
  nn::CheckLater::Checks checks;          // of this rank
  std::vector<std::int64_t> num_experts;  // of each MoE layer
  bool has_auxiliary = false, has_max_logit = false;
  std::int64_t float8_layers = 0;  // whose codes are counted
};

/// The results of the micro-batches of a step; every number is over all ranks.
struct Gradients {
  double loss = 0;              // cross-entropy per valid token
  double total_loss = 0;        // with the auxiliary losses
  std::int64_t num_tokens = 0;  // valid tokens of the step
  /// The parts of the auxiliary losses, each with its weight in it; 0 where that is 0.
  std::array<double, models::kNumAuxiliary> auxiliary{};
  std::vector<at::Tensor> counts_E;  // of each MoE layer, int64, on the host
  /// int64 [layers, experts and dense projections, 3, 3], on the host (fsdp/float8_counts.h);
  /// undefined: they were not counted.
  at::Tensor float8_counts;
  UnreadStep on_device;
};

/// The range of the expert bias of a layer.
struct BiasRange {
  double least = 0, largest = 0;
};

struct Update {
  double grad_norm = 0;
  std::vector<BiasRange> bias;      // of each MoE layer, after the step
  std::optional<double> max_logit;  // of attention, before it was clipped; with QK-clip
  /// A gradient was not finite, or there was no valid token: nothing has moved, on any rank.
  bool skipped = false;
};

struct StepResult {
  Gradients gradients;
  Update update;
};

// Work that the host queues on the device; on one rank none of these waits for it. In between, a
// CUDA graph may stand for the calls of one step.

/// Forward and backward of every micro-batch. The valid tokens of the step are counted over all
/// ranks before the first backward, so that every one of them has the same weight.
/// `num_step_tokens` of the batches is filled in here.
UnreadStep start_gradients(models::Model& model, std::vector<models::MicroBatch> batches,
                           const StepOptions& options);
/// Between Optimizer's begin_step and end_step: clips, updates the parameters and moves the expert
/// bias; or, where it must, skips all of it.
void start_update(models::Model& model, optim::Optimizer& optimizer, UnreadStep& step,
                  const StepOptions& options);
/// Waits, and reads all of it at once. A failed check of a token or a label throws here, on the
/// rank that found it.
StepResult read(const UnreadStep& step);

/// float64 zeros: the term of a rank that has nothing to add to a sum over tokens.
nn::TokenSum no_term(at::IntArrayRef sizes, const at::TensorOptions& options);

/// A whole step with one wait, at its end.
StepResult take_step(models::Model& model, optim::Optimizer& optimizer,
                     std::vector<models::MicroBatch> batches, double lr,
                     const StepOptions& options);

/// The part of take_step after start_gradients.
StepResult finish_step(models::Model& model, optim::Optimizer& optimizer, UnreadStep step,
                       const StepOptions& options);

/// The same in two parts, to look at the gradients in between; each waits.
Gradients accumulate_gradients(models::Model& model, std::vector<models::MicroBatch> batches,
                               const StepOptions& options);
Update apply_gradients(models::Model& model, optim::Optimizer& optimizer,
                       const Gradients& gradients, double lr, const StepOptions& options);

}  // namespace moesh::train
