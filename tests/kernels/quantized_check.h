#pragma once
// What the codes of quantized weights stand for, by formulas that are written out here.

#include <string>

#include "moesh/kernels/quantized.h"

namespace moesh::quantized_check {

/// Checks the numbers of boxes of a tensor, wherever they begin, one by one. What is wrong, or "".
std::string complaint(kernels::Quantization::Format kind);

}  // namespace moesh::quantized_check
