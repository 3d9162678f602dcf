#pragma once
// Compares what another program computed for a checkpoint (tools/record_golden.py) with what a mesh
// computes.

#include <filesystem>

#include "moesh/config/merge.h"
#include "moesh/verify/verify.h"

namespace moesh::verify {

/// Tokens and results: loss, logits, and the gradient of every parameter by the name which it has
/// in moesh; with lora.adapter of those that LoRA adds.
struct Golden : NamedTensors {
  at::Tensor input_ids_BL, labels_BL;
  at::Tensor document_starts_BL;  // undefined: every sequence is one document
  /// The run that must give the same: the model of the checkpoint, the sizes of the file, and for
  /// the rest what was asked for.
  Config config;
  double tolerance = 1e-4;  // of a file in float32; 1e-9 where file and run have float64
  /// In a dtype that is narrower than the file's near ties would flip.
  bool replays() const { return config.training.dtype == "bfloat16"; }
};

/// `settings` name the checkpoint for which `file` was recorded, checkpoint.initial_load: gradients
/// have its names. What they say of the model, or of what the file fixes (its sizes, a loss that is
/// only cross-entropy), must be so: another value throws Error (config).
Golden read_golden(const std::filesystem::path& file, const config::Settings& settings);

/// Loads the checkpoint, and the adapter where there is one, on the mesh of the configuration, runs
/// one forward and backward, and compares. In bfloat16 also what its rounding does is allowed, as
/// one rank has it beside float32; all take the routing of one rank in float32. Every dp rank takes
/// as many sequences.
VerifyReport verify_golden(const Golden& golden);

}  // namespace moesh::verify
