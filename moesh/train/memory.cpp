#include "moesh/train/memory.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>

namespace moesh::train {

namespace {
c10::DeviceAllocator* allocator_of(const std::string& device) {
  return device == "cuda"
             ? dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(c10::DeviceType::CUDA))
             : nullptr;
}
}  // namespace

void reset_peak_memory(const std::string& device) {
  if (auto* allocator = allocator_of(device)) allocator->resetPeakStats(0);
}

double peak_memory_gib(const std::string& device) {
  constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
  if (auto* allocator = allocator_of(device))
    return static_cast<double>(allocator->getDeviceStats(0).allocated_bytes[0].peak) / kGiB;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024.0 / kGiB;
}

}  // namespace moesh::train
