#pragma once
// What LoRA computes, and how it lies in a folder, by formulas that are written out here.

#include <string>

namespace moesh::lora_check {

/// Checks a model with LoRA on all weights: only A and B are trained, and its loss is that of a
/// plain model whose weights are w + alpha / rank B A. What is wrong, or "".
std::string sum_complaint(const std::string& model);

/// Where every number of A and B is in the tensors of PEFT.
std::string order_complaint(const std::string& model);

}  // namespace moesh::lora_check
