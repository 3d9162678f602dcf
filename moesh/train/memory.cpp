#include "moesh/train/memory.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <set>

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

namespace {

// The text after "KEY:" in the first such line of a file of /proc.
std::string value_in(const std::filesystem::path& file, const std::string& key) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(key)) continue;
    const auto colon = line.find(':');
    const auto begin = line.find_first_not_of(" \t", colon + 1);
    if (colon != std::string::npos && begin != std::string::npos) return line.substr(begin);
  }
  return "";
}

struct Peak {
  const char* name;  // part of what the driver says
  double tflops;
};
// The longer names first: the first that fits counts.
constexpr Peak kPeaks[] = {{"GB200", 2500},    {"B200", 2250}, {"B100", 1750},
                           {"H200 NVL", 836},  {"H200", 989},  {"H100 NVL", 836},
                           {"H100 PCIe", 756}, {"H100", 989},  {"A100", 312},
                           {"L40S", 362},      {"L4", 121}};

}  // namespace

std::string device_name(const std::string& device) {
  if (device == "cpu") return value_in("/proc/cpuinfo", "model name");
  std::set<std::string> names;
  std::error_code none;
  for (const auto& gpu : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", none))
    names.insert(value_in(gpu.path() / "information", "Model"));
  return names.size() == 1 ? *names.begin() : "";
}

double peak_tflops(const std::string& device_name) {
  for (const Peak& peak : kPeaks)
    if (device_name.find(peak.name) != std::string::npos) return peak.tflops;
  return 0;
}

}  // namespace moesh::train
