#pragma once
// What is reported of a step.

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace moesh::train {

/// The load of the experts over all MoE layers.
struct ExpertLoad {
  double max_over_mean = 0;   // of the busiest expert of a layer, in the worst layer
  std::int64_t num_idle = 0;  // experts without a token
};
/// From the tokens of each expert, layer by layer.
ExpertLoad expert_load(const std::vector<at::Tensor>& counts_E);

/// Of one file that is not trained on.
struct ValidationLoss {
  std::string name;
  double loss;  // cross-entropy per valid token

  double perplexity() const { return std::exp(loss); }
};

/// One step; every number is that of all ranks.
struct StepRecord {
  std::int64_t step = 0;  // from 1
  double seconds = 0;     // from the end of the step before
  double loss = 0;        // cross-entropy per valid token
  double total_loss = 0;  // with the auxiliary losses
  double grad_norm = 0;   // before it was clipped
  double lr = 0;
  std::int64_t num_tokens = 0;  // valid ones
  double flops_per_token = 0;
  double memory_gib = 0;  // the most so far, of this process or its device
  ExpertLoad experts = {};
  bool skipped = false;                         // nothing has moved
  std::vector<ValidationLoss> validation = {};  // after the step, where one was due

  double tokens_per_second() const { return static_cast<double>(num_tokens) / seconds; }
  double tflops() const { return tokens_per_second() * flops_per_token / 1e12; }
};

}  // namespace moesh::train
