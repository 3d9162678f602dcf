#pragma once
// The tensors of a checkpoint by name, and the parts of them that this rank has.

#include <functional>
#include <string>
#include <vector>

#include "moesh/checkpoint/part.h"
#include "moesh/config/config.h"
#include "moesh/models/model.h"
#include "moesh/optim/optimizer.h"

namespace moesh::train {

/// A weight that is kept beside the files of the model: they have no place for it, or not for all
/// of its bits.
std::string master_name(const std::string& param);

/// The parts of the weights and expert biases that this rank has.
std::vector<checkpoint::TensorPart> weight_parts(models::Model& model);
/// The ones that a checkpoint has: with LoRA only its matrices, else all.
std::vector<checkpoint::TensorPart> saved_weights(models::Model& model);

/// A table of tensors each of which is one part under its own name.
formats::DiskTable own_names(const std::vector<checkpoint::TensorPart>& parts);

struct CheckpointParts {
  std::vector<checkpoint::TensorPart> weights, optimizer,
      counts;  // `counts` are those of the routers

  CheckpointParts(models::Model& model, const optim::Optimizer& of_run,
                  const std::vector<at::Tensor>& counts_E);
  /// The parts of one rank with the whole model: names, shapes and types in the order of the model,
  /// without values. A checkpoint is the same whatever stages a rank has.
  static CheckpointParts of_whole_model(const config::Config& config,
                                        const optim::Optimizer& of_stages);

  /// All that is not saved as weights: also those of them which `keeps_master` says, under another
  /// name.
  std::vector<checkpoint::TensorPart> state(
      const std::function<bool(const checkpoint::TensorPart&)>& keeps_master) const;
};

}  // namespace moesh::train
