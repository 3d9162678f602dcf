#pragma once
// The loss on files that the run does not train on.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moesh/train/build.h"
#include "moesh/train/metrics/record.h"

namespace moesh::train {

struct ValidationSet {
  std::string name;
  std::unique_ptr<data::Dataset> dataset;
};

/// The files of [[validation.source]]; ranks in threads may share them.
std::vector<ValidationSet> open_validation(const Config& config);

/// Whether there are files to validate on, and validation.interval asks for it after this step.
bool validation_is_due(const Config& config, std::int64_t num_steps);

/// Cross-entropy per valid token of each set, over the sequences of validation.steps optimizer
/// steps, or all of them if there are fewer: the same number on every mesh with the same global
/// batch. Nothing moves, no expert is counted, and auxiliary losses are left out. Collective.
/// `stops` is called after each of the steps, and has one answer on all ranks; if it is true, there
/// is no result.
std::optional<std::vector<ValidationLoss>> validate_model(
    models::Model& model, const Config& config, const Mesh& mesh,
    const std::vector<ValidationSet>& sets,
    const std::function<bool()>& stops = [] { return false; });

}  // namespace moesh::train
