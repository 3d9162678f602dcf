#pragma once
// Rows in another order, with gradients: gathers both ways, never a scatter-add. Each rank moves
// rows that it holds, so that the layout stays: Rows is a Tensor<L>, or rows AtNode<L> between two
// hops.

#include "moesh/kernels/rows.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/ops.h"

namespace moesh::nn {

/// out[i] = x[index[i]]; `inverse[j]` is where x[j] went, -1: nowhere. Backward gathers by
/// `inverse`.
template <class Rows>
Rows permute_rows(const Rows& x, const at::Tensor& index, const at::Tensor& inverse) {
  return map_linear(
      [&](const at::Tensor& t) { return kernels::gather_rows(t, index); },
      [inverse](const at::Tensor& g) { return kernels::gather_rows(g.contiguous(), inverse); }, x);
}

/// x_ND -> the K copies of each token, in the order of experts. Backward: combine_rows.
template <class Rows>
Rows spread_rows(const Rows& x_ND, const at::Tensor& token_R, const at::Tensor& inverse_NK) {
  return map_linear([&](const at::Tensor& t) { return kernels::gather_rows(t, token_R); },
                    [inverse_NK](const at::Tensor& g) {
                      return kernels::combine_rows(g.contiguous(), inverse_NK);
                    },
                    x_ND);
}

/// The scores of the rows that spread_rows makes, from those of each token; backward: each goes
/// back to its choice, and choices without a row get 0.
template <class Rows>
Rows scores_of_rows(const Rows& scores_NK, const kernels::Sorted& sorted) {
  return map_linear(
      [&](const at::Tensor& t) { return kernels::gather_rows(t.flatten(), sorted.order_R); },
      [inverse_NK = sorted.inverse_TK](const at::Tensor& g) {
        return kernels::gather_rows(g.contiguous(), inverse_NK.flatten()).view(inverse_NK.sizes());
      },
      scores_NK);
}

/// Sums the K rows of each token, in the order of k. Backward: spread_rows.
template <class Rows>
Rows combine_rows(const Rows& rows_RD, const at::Tensor& token_R, const at::Tensor& inverse_NK) {
  return map_linear(
      [&](const at::Tensor& t) {
        return raw::is_not_computed(t) ? raw::not_computed({inverse_NK.size(0), t.size(1)}, t)
                                       : kernels::combine_rows(t, inverse_NK);
      },
      [token_R](const at::Tensor& g) { return kernels::gather_rows(g.contiguous(), token_R); },
      rows_RD);
}

}  // namespace moesh::nn
