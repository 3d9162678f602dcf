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

/// Cross-entropy per valid token of each set, over its first validation.steps times the sequences
/// of an optimizer step, or all of them where there are fewer: the same number on every mesh with
/// the same global batch. Nothing moves, no expert is counted, and auxiliary losses are left out.
/// Collective. `stops` is asked after each of the steps, on all ranks with one answer: then there
/// is not a result.
std::optional<std::vector<ValidationLoss>> validate_model(
    models::Model& model, const Config& config, const Mesh& mesh,
    const std::vector<ValidationSet>& sets,
    const std::function<bool()>& stops = [] { return false; });

}  // namespace moesh::train
