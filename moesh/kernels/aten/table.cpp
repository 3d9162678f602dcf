#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace aten {

// Each is in the file of its name.
void add_experts(KernelTable&);
void add_loss(KernelTable&);
void add_routing(KernelTable&);
void add_rowwise(KernelTable&);
void add_update(KernelTable&);

}  // namespace aten

const KernelTable& aten_kernels() {
  static const KernelTable table = [] {
    KernelTable t{.name = "aten"};
    for (auto* add : {aten::add_experts, aten::add_loss, aten::add_routing, aten::add_rowwise,
                      aten::add_update})
      add(t);
    return t;
  }();
  return table;
}

}  // namespace moesh::kernels
