#pragma once
// Rows in another order, with gradients: gathers both ways, never a scatter-add. Plain tensors: one
// rank's own rows.

#include <ATen/core/Tensor.h>

namespace moesh::nn {

/// out[i] = x[index[i]]; `inverse[j]` is where x[j] went, -1: nowhere. Backward gathers by
/// `inverse`.
at::Tensor permute_rows(const at::Tensor& x, const at::Tensor& index, const at::Tensor& inverse);

/// x_ND -> the K copies of each token, in the order of experts. Backward: combine_rows.
at::Tensor spread_rows(const at::Tensor& x_ND, const at::Tensor& token_R,
                       const at::Tensor& inverse_NK);

/// Sums the K rows of each token, in the order of k. Backward: spread_rows.
at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& token_R,
                        const at::Tensor& inverse_NK);

}  // namespace moesh::nn
