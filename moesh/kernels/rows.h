#pragma once
// Rows between tokens and experts: where each goes (stable counting sorts, O(N + E)), and moving
// them without a scatter-add. T tokens, D model, E experts, e local experts, K top-k, N routed rows
// (T*K), R rows at their experts

#include <ATen/core/Tensor.h>

namespace moesh::kernels {

/// Experts [first, first + count): those which one rank computes.
struct ExpertRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

struct Sorted {
  at::Tensor order_R;     // position in expert-major order -> flat index t*K + k
  at::Tensor token_R;     // position -> token t
  at::Tensor inverse_TK;  // [t, k] -> position, -1 if that expert is outside of the range
  at::Tensor ends_e;      // the rows of each expert of the range end before this position
};

/// Sorts the choices experts_TK (int64) by expert; equal experts keep the order of their flat
/// index. Only experts of the range take part: with {0, E} R is T*K and inverse_TK undoes order_R.
/// All results are int32 on the device of the input (on meta ends_e is on the host, where it can
/// have values). An accelerator is not waited for, unless the range is a part of the experts: then
/// only it knows R. A choice that is not an expert is an Error(data) on the CPU; an
/// accelerator stops with an assertion.
Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts, ExpertRange range);
inline Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts) {
  return sort_by_expert(experts_TK, num_experts, {0, num_experts});
}

struct Reordered {
  at::Tensor index_R;    // expert-major position -> rank-major row: expert_major =
                         // gather_rows(rank_major, index_R)
  at::Tensor inverse_R;  // rank-major row -> expert-major position
  at::Tensor ends_e;     // the rows of each expert end before this expert-major position
};

/// Rows arrive ordered by rank, then expert; counts_re[r][e] of them (int64, on the host) from rank
/// r for expert e. Gives the order by expert, then rank: int32 on `device` (for meta ends_e is on
/// the host).
Reordered rank_major_to_expert_major(const at::Tensor& counts_re, at::Device device = at::kCPU);

/// The number of rows of each expert, int64 on the device of ends_e.
at::Tensor counts_of(const at::Tensor& ends_e);

/// out[i] = x[index[i]], and zeros where index[i] is -1. x is [T, D] or [T], of any dtype; index
/// int32 [R]. Adjoint: combine_rows(d_out, inverse_TK); for a permutation simply gather_rows(d_out,
/// inverse).
at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index_R);

/// y[t] = sum over k of rows[inverse[t][k]], in the order of k, in float32 (float64 for float64),
/// rounded once; -1 adds nothing. rows is [R, D] or [R]; inverse int32. Adjoint: gather_rows(d_y,
/// token_R).
at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK);

}  // namespace moesh::kernels
