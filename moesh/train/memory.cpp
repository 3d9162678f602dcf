#include "moesh/train/memory.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>

namespace moesh::train {

double peak_memory_gib(const std::string& device) {
  constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
  if (device == "cuda") {
    auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(c10::DeviceType::CUDA));
    if (allocator)
      return static_cast<double>(allocator->getDeviceStats(0).allocated_bytes[0].peak) / kGiB;
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024.0 / kGiB;
}

}  // namespace moesh::train
