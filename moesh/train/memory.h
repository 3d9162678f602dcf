#pragma once

#include <string>

namespace moesh::train {

/// The most memory that was in use so far, in GiB: the CUDA allocator's on cuda, else the process's
/// resident set.
double peak_memory_gib(const std::string& device);
/// "So far" begins anew, on cuda.
void reset_peak_memory(const std::string& device);

// The kind of a device, and its peak speed.

/// "NVIDIA H200", as the driver calls the GPUs of this machine where they are all the same; ""
/// if not, or if it is unknown. "cpu": the name of the processor.
std::string device_name(const std::string& device);

/// The peak of bfloat16 products without sparsity on one such GPU, in TFLOP/s, as its maker gives
/// it; 0 where moesh does not know it.
double peak_tflops(const std::string& device_name);

}  // namespace moesh::train
