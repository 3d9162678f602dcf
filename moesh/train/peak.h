#pragma once
// What a device is, and how fast it could be.

#include <string>

namespace moesh::train {

/// "NVIDIA H200", as the driver calls the GPUs of this machine where they are all the same; ""
/// where they are not, or nobody knows. "cpu": the name of the processor.
std::string device_name(const std::string& device);

/// Of bfloat16 products without sparsity on one such GPU, in TFLOP/s, as its maker gives it; 0
/// where moesh does not know it.
double peak_tflops(const std::string& device_name);

}  // namespace moesh::train
