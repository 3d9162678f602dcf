#pragma once
// Rows in another order, with gradients: gathers both ways, never a scatter-add. Each rank moves
// rows that it holds, so that the layout stays.

#include "moesh/kernels/rows.h"
#include "moesh/spmd/map.h"

namespace moesh::nn {

/// out[i] = x[index[i]]; `inverse[j]` is where x[j] went, -1: nowhere. Backward gathers by
/// `inverse`.
template <auto L>
Tensor<L> permute_rows(const Tensor<L>& x, const at::Tensor& index, const at::Tensor& inverse) {
  return map_linear(
      [&](const at::Tensor& t) { return kernels::gather_rows(t, index); },
      [inverse](const at::Tensor& g) { return kernels::gather_rows(g.contiguous(), inverse); }, x);
}

/// x_ND -> the K copies of each token, in the order of experts. Backward: combine_rows.
template <auto L>
Tensor<L> spread_rows(const Tensor<L>& x_ND, const at::Tensor& token_R,
                      const at::Tensor& inverse_NK) {
  return map_linear([&](const at::Tensor& t) { return kernels::gather_rows(t, token_R); },
                    [inverse_NK](const at::Tensor& g) {
                      return kernels::combine_rows(g.contiguous(), inverse_NK);
                    },
                    x_ND);
}

/// Sums the K rows of each token, in the order of k. Backward: spread_rows.
template <auto L>
Tensor<L> combine_rows(const Tensor<L>& rows_RD, const at::Tensor& token_R,
                       const at::Tensor& inverse_NK) {
  return map_linear(
      [&](const at::Tensor& t) { return kernels::combine_rows(t, inverse_NK); },
      [token_R](const at::Tensor& g) { return kernels::gather_rows(g.contiguous(), token_R); },
      rows_RD);
}

}  // namespace moesh::nn
