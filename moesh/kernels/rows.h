#pragma once
// Moving rows between tokens and experts, without a scatter-add: each of the two functions is the
// adjoint of the other. T tokens, D model, K top-k, R rows at their experts

#include <ATen/core/Tensor.h>

namespace moesh::kernels {

/// out[i] = x[index[i]], and zeros where index[i] is -1. x is [T, D] or [T], of any dtype; index
/// int32 [R]. Adjoint: combine_rows(d_out, inverse_TK); for a permutation simply gather_rows(d_out,
/// inverse).
at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index_R);

/// y[t] = sum over k of rows[inverse[t][k]], in the order of k, in float32 (float64 for float64),
/// rounded once; -1 adds nothing. rows is [R, D] or [R]; inverse int32. Adjoint: gather_rows(d_y,
/// token_R).
at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK);

}  // namespace moesh::kernels
