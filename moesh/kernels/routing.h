#pragma once
// The router: its logits, a product with few columns in the precision of the gate; the best of each
// token's scores; the weights of what it chose; and what a balance loss compares. And rows between
// tokens and experts. T tokens, D model, E experts, e local experts, K top-k, B sequences,
// N routed rows (T*K), R rows at their experts

#include <ATen/core/Tensor.h>

namespace moesh::kernels {

/// x gate' in the dtype of the gate (float32 or float64); x is of that dtype or bfloat16. Own
/// kernels (bfloat16 on compute capability 9.0) make nothing of size [T, D] on the way.
at::Tensor gate_forward(const at::Tensor& x_TD, const at::Tensor& gate_ED);

struct GateGradients {
  at::Tensor x_TD;  // dtype of x
  at::Tensor gate_ED;
  at::Tensor rows_TP = {}, weight_PD = {};  // of both, in the dtype of x
};
/// as_product: what adds the gradient of x to others may take it as the product of `rows_TP` and
/// `weight_PD`; where these are defined, x_TD is not.
GateGradients gate_backward(const at::Tensor& x_TD, const at::Tensor& gate_ED,
                            const at::Tensor& d_logits_TE, bool as_product = false);

struct TopK {
  at::Tensor values_TK;   // descending, dtype of the scores
  at::Tensor experts_TK;  // int64
};

/// The K largest of each token's scores [T, E] (float32 or float64), largest first. Among equal
/// scores the lowest expert wins, on every device. A NaN is an Error(data) that names its token;
/// own kernels of an accelerator, for which the host does not wait, choose it first, so that it
/// reaches the loss. -inf is a legal score (a masked expert).
TopK top_k(const at::Tensor& scores_TE, std::int64_t k);

enum class Scoring {
  sigmoid,         // s = sigmoid(logit)
  softmax,         // s = softmax over all experts
  softmax_chosen,  // s = softmax over the chosen
};

/// A weight is the score of a chosen expert, over the sum of the token's (and epsilon) if they are
/// to add up to one, times the scale.
struct Weighing {
  Scoring scoring = Scoring::sigmoid;
  bool normalize = false;
  double epsilon = 0, scale = 1;
};
/// The weights [T, K] of the chosen experts (int64) from the logits (float32 or float64).
at::Tensor weigh_forward(const Weighing& weighing, const at::Tensor& logits_TE,
                         const at::Tensor& experts_TK);
/// From their gradient to that of the logits.
at::Tensor weigh_backward(const Weighing& weighing, const at::Tensor& logits_TE,
                          const at::Tensor& experts_TK, const at::Tensor& d_weights_TK);

/// int64 [E]: how often each expert was chosen by the tokens that count: valid_T1 (bool) is true,
/// or undefined. Choices below 0, or from num_experts on, are not counted.
at::Tensor count_choices(const at::Tensor& experts_TK, const at::Tensor& valid_T1,
                         std::int64_t num_experts);

/// The tokens that a balance loss takes together.
struct BalanceOf {
  bool softmax = false;     // probabilities are the softmax of the logits, not shares of sigmoids
  at::Tensor experts_TK;    // int64: the choices that count
  at::Tensor valid_T1;      // bool: the tokens that count; undefined: all
  at::Tensor members_BT;    // 1 where the token is of the sequence, else 0; dtype of the logits
  bool equal_runs = false;  // the tokens are those of the first sequence, then of the next, and so
                            // on, as many of each
};
/// [2, B, E], of the tokens that count: sums of probabilities, and how often experts were chosen.
at::Tensor balance_sums(const BalanceOf& balance, const at::Tensor& logits_TE);
/// From the gradient of the sums of probabilities [B, E] to that of the logits.
at::Tensor balance_sums_backward(const BalanceOf& balance, const at::Tensor& logits_TE,
                                 const at::Tensor& d_sums_BE);

// ---- where each row goes (stable counting sorts, O(N + E)), and moving rows without a scatter-add
// ----

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
