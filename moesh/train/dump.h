#pragma once
// Tensors as a safetensors file, for `moesh compare` and other readers.

#include <string>

#include "moesh/train/parity.h"

namespace moesh::train {

void write_tensors(const std::string& path, const NamedTensors& tensors);

}  // namespace moesh::train
