#pragma once
// LibTorch's own functions of meta tensors, where Python has put others over them.

#include <torch/library.h>

namespace moesh::kernels::meta {

/// `import torch` replaces the functions of the device meta by ones that are written in Python:
/// slow, and with other temporaries. Puts those that a step calls in front again, for as long as
/// the library lives; nothing where no Python is there.
void restore_native(torch::Library& library);

}  // namespace moesh::kernels::meta
