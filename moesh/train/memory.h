#pragma once
#include <string>

namespace moesh::train {

/// The most memory that was in use so far, in GiB: the CUDA allocator's on cuda, else the process's
/// resident set.
double peak_memory_gib(const std::string& device);
/// "So far" begins anew, on cuda.
void reset_peak_memory(const std::string& device);

}  // namespace moesh::train
