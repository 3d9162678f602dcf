#pragma once
// Dropout in LoRA's linear layers, by formulas that are written out here.

#include <string>

namespace moesh::dropout_check {

/// Checks which numbers are dropped, one by one, and y = w x + scale B (A d(x)) with its gradients.
/// What is wrong, or "".
std::string complaint();

}  // namespace moesh::dropout_check
