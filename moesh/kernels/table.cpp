#include "moesh/kernels/table.h"

#include "moesh/base/error.h"
#include "moesh/kernels/gpu_kernels.h"

namespace moesh::kernels {
namespace aten {

// Each is in the file of its name.
void add_delta_rule(KernelTable&);
void add_experts(KernelTable&);
void add_float8(KernelTable&);
void add_routing(KernelTable&);
void add_rowwise(KernelTable&);
void add_update(KernelTable&);

}  // namespace aten

namespace {

// A rank is a thread, and models of several ranks may have other kernels.
thread_local GpuKernels chosen = GpuKernels::automatic;

[[noreturn]] void refuse(const std::string& reason) {
  throw Error(ErrorKind::config, "kernels.gpu is own, but " + reason + "; use auto or library");
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
UseGpuKernels::UseGpuKernels(GpuKernels kernels) : scope_(chosen, kernels) {}

const KernelTable& aten_kernels() {
  static const KernelTable table = [] {
    KernelTable t{.name = "aten"};
    for (auto* add : {aten::add_delta_rule, aten::add_experts, aten::add_float8, aten::add_routing,
                      aten::add_rowwise, aten::add_update})
      add(t);
    return t;
  }();
  return table;
}

const KernelTable& first_that_takes(std::span<const KernelTable* const> tables, at::Device device) {
  if (chosen == GpuKernels::library) return aten_kernels();
  std::string reason;
  for (const KernelTable* table : tables) {
    reason = table->refuses_device ? table->refuses_device(device) : "";
    if (reason.empty()) return *table;
  }
  if (chosen == GpuKernels::own) refuse(reason);
  return aten_kernels();
}

const KernelTable& for_experts(const KernelTable& table, const ExpertsConfig& config,
                               const ExpertsWeights& weights) {
  const std::string reason = table.refuses_experts ? table.refuses_experts(config, weights) : "";
  if (reason.empty()) return table;
  if (chosen == GpuKernels::own) refuse(reason);
  MOESH_CHECK(!weights.codes.defined(), ErrorKind::config,
              "the weights are kept as codes of float8 (kernels.weight_copies), but ", reason,
              "; set kernels.weight_copies to false");
  return aten_kernels();
}

const KernelTable& kernels_for(at::Device device) {
  if (device.is_cpu()) return cpu_kernels();
  if (device.is_meta()) return meta_kernels();
  static const KernelTable* const of_cuda[] = {&hopper_kernels(), &ampere_kernels()};
  if (device.is_cuda()) return first_that_takes(of_cuda, device);
  if (chosen == GpuKernels::own) refuse(detail::concat("moesh has no kernels for ", device));
  return aten_kernels();
}

const KernelTable& kernels_for(const ExpertsConfig& config, const ExpertsWeights& weights) {
  const at::Device device = weights.w1_eFD.device();
  const KernelTable& table = kernels_for(device);
  if (device.is_cuda()) return for_experts(table, config, weights);
  // kernels.gpu says nothing about other devices.
  return table.refuses_experts && !table.refuses_experts(config, weights).empty() ? aten_kernels()
                                                                                  : table;
}

}  // namespace moesh::kernels
