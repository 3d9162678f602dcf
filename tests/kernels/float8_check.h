#pragma once
// Products in float8 by the definition, in loops and float64: no code is common to it and the
// kernels. What is wrong, or "".

#include <string>

#include "moesh/kernels/float8.h"

namespace moesh::float8_check {

/// Codes and scales of rows and of weights, each with the formula.
std::string codes_complaint();
/// What count_float8_rows and count_float8_weight count.
std::string counts_complaint();
/// Packed rows, byte by byte, and what is unpacked of them.
std::string packed_complaint();
/// float8_product of a weight and of a transposed one, in this type.
std::string product_complaint(at::ScalarType dtype);
/// The experts' forward, the gradients of their input, scores and weights, and what they count, in
/// this type.
std::string experts_complaint(at::ScalarType dtype);

}  // namespace moesh::float8_check
