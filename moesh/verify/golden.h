#pragma once
// What another program computed for a checkpoint (tools/record_golden.py), and what a mesh
// computes.

#include <filesystem>
#include <string>

#include "moesh/config/config.h"
#include "moesh/train/build.h"
#include "moesh/verify/verify.h"

namespace moesh::verify {

using train::ModelSetup;

/// Tokens and results: loss, logits, and the gradient of every parameter by the name which it has
/// in moesh.
struct Golden : NamedTensors {
  at::Tensor input_ids_BL, labels_BL;
};

/// `folder` is the checkpoint for which `file` was recorded: gradients have its names.
Golden read_golden(const std::filesystem::path& file, const std::filesystem::path& folder,
                   const models::AnyConfig& model);

/// Loads the checkpoint on the mesh of the configuration, runs one forward and backward, and
/// compares. Every dp rank takes as many sequences.
VerifyReport verify_golden(const Golden& golden, const std::filesystem::path& folder,
                           const ModelSetup& setup, const Config& config);

/// 1e-4 in float32 and float64 (the file is float32), 2e-2 in bfloat16.
double golden_tolerance(const Config& config);

}  // namespace moesh::verify
