#include "moesh/kernels/float8.h"

#include <ATen/ops/mm.h>

#include "moesh/kernels/table.h"

namespace moesh::kernels::aten {
namespace {

at::Tensor float8_product(const at::Tensor& rows_MK, const at::Tensor& w_KN, std::int64_t tile) {
  return at::mm(float8_rows(rows_MK, tile), float8_weight(w_KN, tile));
}

}  // namespace

void add_float8(KernelTable& t) { t.float8_product = float8_product; }

}  // namespace moesh::kernels::aten
