#pragma once
// Tensors as a safetensors file, for `moesh compare` and other readers.

#include <string>

#include "moesh/verify/parity.h"

namespace moesh::verify {

void write_tensors(const std::string& path, const NamedTensors& tensors);

}  // namespace moesh::verify
