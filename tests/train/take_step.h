#pragma once
#include "moesh/train/step.h"

namespace moesh::train {

/// A whole step by itself: a Stepper takes many.
inline StepResult take_step(models::Model& model, optim::Optimizer& optimizer,
                            std::vector<models::MicroBatch> batches, double lr,
                            const StepOptions& options) {
  optimizer.begin_step(lr);
  return finish_step(model, optimizer, start_gradients(model, std::move(batches), options),
                     options);
}

}  // namespace moesh::train
