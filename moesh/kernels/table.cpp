#include "moesh/kernels/table.h"

#include "moesh/base/error.h"
#include "moesh/kernels/gpu_kernels.h"

namespace moesh::kernels {
namespace {

thread_local GpuKernels chosen = GpuKernels::automatic;

struct Row {
  at::DeviceType device;
  const KernelTable& (*table)();
};
constexpr Row kRows[] = {
    {at::kCPU, cpu_kernels}, {at::kMeta, meta_kernels}, {at::kCUDA, hopper_kernels}};

const KernelTable& table_of(at::Device device) {
  for (const Row& row : kRows) {
    if (row.device == device.type()) return row.table();
  }
  MOESH_CHECK(chosen != GpuKernels::own, ErrorKind::config,
              "kernels.gpu is own, but moesh has no kernels for ", device, "; use auto or library");
  return aten_kernels();
}

const KernelTable& unless_refused(const KernelTable& own, const std::string& reason) {
  if (reason.empty()) return own;
  MOESH_CHECK(chosen != GpuKernels::own, ErrorKind::config, "kernels.gpu is own, but ", reason,
              "; use auto or library");
  return aten_kernels();
}

}  // namespace

const char* to_string(GpuKernels kernels) {
  switch (kernels) {
    case GpuKernels::automatic: return "auto";
    case GpuKernels::own: return "own";
    case GpuKernels::library: return "library";
  }
  return "unknown";
}

GpuKernels gpu_kernels() { return chosen; }
UseGpuKernels::UseGpuKernels(GpuKernels kernels) : before_(chosen) { chosen = kernels; }
UseGpuKernels::~UseGpuKernels() { chosen = before_; }

const KernelTable& own_or_library(const KernelTable& own, at::Device device) {
  if (!own.refuses_device) return own;
  if (chosen == GpuKernels::library) return aten_kernels();
  return unless_refused(own, own.refuses_device(device));
}

const KernelTable& own_or_library(const KernelTable& own, const ExpertsConfig& config,
                                  const ExpertsWeights& weights) {
  const KernelTable& table = own_or_library(own, weights.w1_eFD.device());
  return table.refuses_experts ? unless_refused(table, table.refuses_experts(config, weights))
                               : table;
}

const KernelTable& kernels_for(at::Device device) {
  return own_or_library(table_of(device), device);
}

const KernelTable& kernels_for(const ExpertsConfig& config, const ExpertsWeights& weights) {
  return own_or_library(table_of(weights.w1_eFD.device()), config, weights);
}

}  // namespace moesh::kernels
