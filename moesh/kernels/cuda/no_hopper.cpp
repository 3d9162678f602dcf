// Stands in for the kernels of CUDA where they are not compiled.
#include "moesh/kernels/table.h"

namespace moesh::kernels {

const KernelTable& hopper_kernels() {
  static const KernelTable table = [] {
    KernelTable t = aten_kernels();
    t.name = "hopper";
    t.refuses_device = [](at::Device) -> std::string {
      return "the CUDA kernels of moesh were not compiled: no CUDA compiler was found";
    };
    return t;
  }();
  return table;
}

}  // namespace moesh::kernels
