#pragma once
// One optimizer step: the gradients of all micro-batches, their norm, the update, the expert bias.

#include <vector>

#include "moesh/models/model.h"
#include "moesh/optim/grad_norm.h"
#include "moesh/optim/optimizer.h"

namespace moesh::train {

struct StepOptions {
  double max_norm = 1;        // of the gradient; 0: not clipped
  double bias_coeff = 0.001;  // by how much the expert bias moves; 0: it stays
  models::ForwardOptions forward;
};

/// What the micro-batches of a step gave; every number is that of all ranks.
struct Gradients {
  double loss = 0;                   // cross-entropy per valid token
  double total_loss = 0;             // with the auxiliary losses
  std::int64_t num_tokens = 0;       // valid tokens of the step
  std::vector<at::Tensor> counts_E;  // of each MoE layer, int64, on the host
};

struct Update {
  double grad_norm = 0;
  /// A gradient was not finite, or there was no valid token: nothing has moved, on any rank.
  bool skipped = false;
};

/// Forward and backward of every micro-batch. The valid tokens of the step are counted over all
/// ranks before the first backward, so that every one of them has the same weight.
/// `num_step_tokens` of the batches is filled in here.
Gradients accumulate_gradients(models::Model& model, std::vector<models::MicroBatch> batches,
                               const StepOptions& options);

/// Clips, updates the parameters and moves the expert bias; or, where it must, skips all of it.
Update apply_gradients(models::Model& model, optim::Optimizer& optimizer,
                       const Gradients& gradients, double lr, const StepOptions& options);

}  // namespace moesh::train
