#include "moesh/kernels/routing.h"

#include <ATen/core/grad_mode.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace {

void check_gate(const at::Tensor& x_TD, const at::Tensor& gate_ED) {
  MOESH_CHECK(gate_ED.defined() && gate_ED.dim() == 2 &&
                  (gate_ED.scalar_type() == at::kFloat || gate_ED.scalar_type() == at::kDouble),
              ErrorKind::data, "gate_ED is ", describe(gate_ED),
              "; pass a float32 or float64 gate [experts, model]");
  MOESH_CHECK(
      x_TD.defined() && x_TD.dim() == 2 && x_TD.size(1) == gate_ED.size(1) &&
          (x_TD.scalar_type() == gate_ED.scalar_type() || x_TD.scalar_type() == at::kBFloat16),
      ErrorKind::data, "x_TD is ", describe(x_TD), "; with a gate ", describe(gate_ED),
      " pass [tokens, ", gate_ED.size(1), "] of its dtype or bfloat16");
  check_same_device("gate_ED", gate_ED, "x_TD", x_TD);
}

}  // namespace

at::Tensor gate_forward(const at::Tensor& x_TD, const at::Tensor& gate_ED) {
  check_gate(x_TD, gate_ED);
  const at::NoGradGuard no_grad;
  return kernels_for(x_TD.device()).gate_forward(x_TD.contiguous(), gate_ED.contiguous());
}

GateGradients gate_backward(const at::Tensor& x_TD, const at::Tensor& gate_ED,
                            const at::Tensor& d_logits_TE, bool as_product) {
  check_gate(x_TD, gate_ED);
  MOESH_CHECK(d_logits_TE.defined() && d_logits_TE.dim() == 2 &&
                  d_logits_TE.size(0) == x_TD.size(0) && d_logits_TE.size(1) == gate_ED.size(0) &&
                  d_logits_TE.scalar_type() == gate_ED.scalar_type(),
              ErrorKind::data, "d_logits_TE is ", describe(d_logits_TE), "; the logits of x ",
              describe(x_TD), " and gate ", describe(gate_ED), " have a line for each token");
  const at::NoGradGuard no_grad;
  return kernels_for(x_TD.device())
      .gate_backward(x_TD.contiguous(), gate_ED.contiguous(), d_logits_TE.contiguous(), as_product);
}

namespace {

void check_routed(const at::Tensor& logits_TE, const at::Tensor& experts_TK) {
  MOESH_CHECK(logits_TE.defined() && logits_TE.dim() == 2 &&
                  (logits_TE.scalar_type() == at::kFloat || logits_TE.scalar_type() == at::kDouble),
              ErrorKind::data, "logits_TE is ", describe(logits_TE),
              "; pass float32 or float64 logits [tokens, experts]");
  check_tensor("experts_TK", experts_TK, at::kLong, 2);
  check_same_device("experts_TK", experts_TK, "logits_TE", logits_TE);
  MOESH_CHECK(experts_TK.size(0) == logits_TE.size(0), ErrorKind::data, "experts_TK is ",
              describe(experts_TK), " for logits ", describe(logits_TE),
              "; every token has its choices");
}

void check_flags(const at::Tensor& valid_T1, const at::Tensor& experts_TK) {
  if (!valid_T1.defined()) return;
  check_tensor("valid_T1", valid_T1, at::kBool, 2);
  MOESH_CHECK(valid_T1.numel() == experts_TK.size(0), ErrorKind::data, "valid_T1 is ",
              describe(valid_T1), " for choices ", describe(experts_TK),
              "; it says of every token whether it counts");
}

at::Tensor without_gaps(const at::Tensor& t) { return t.defined() ? t.contiguous() : t; }

BalanceOf without_gaps(const BalanceOf& b) {
  return {b.softmax, b.experts_TK.contiguous(), without_gaps(b.valid_T1), b.members_BT,
          b.equal_runs};
}

}  // namespace

at::Tensor weigh_forward(const Weighing& weighing, const at::Tensor& logits_TE,
                         const at::Tensor& experts_TK) {
  check_routed(logits_TE, experts_TK);
  const at::NoGradGuard no_grad;
  return kernels_for(logits_TE.device())
      .weigh_forward(weighing, logits_TE.contiguous(), experts_TK.contiguous());
}

at::Tensor weigh_backward(const Weighing& weighing, const at::Tensor& logits_TE,
                          const at::Tensor& experts_TK, const at::Tensor& d_weights_TK) {
  check_routed(logits_TE, experts_TK);
  check_tensor("d_weights_TK", d_weights_TK, logits_TE.scalar_type(), 2);
  MOESH_CHECK(d_weights_TK.sizes() == experts_TK.sizes(), ErrorKind::data, "d_weights_TK is ",
              describe(d_weights_TK), " for choices ", describe(experts_TK));
  const at::NoGradGuard no_grad;
  return kernels_for(logits_TE.device())
      .weigh_backward(weighing, logits_TE.contiguous(), experts_TK.contiguous(),
                      d_weights_TK.contiguous());
}

at::Tensor count_choices(const at::Tensor& experts_TK, const at::Tensor& valid_T1,
                         std::int64_t num_experts) {
  check_tensor("experts_TK", experts_TK, at::kLong, 2);
  check_flags(valid_T1, experts_TK);
  const at::NoGradGuard no_grad;
  return kernels_for(experts_TK.device())
      .count_choices(experts_TK.contiguous(), without_gaps(valid_T1), num_experts);
}

at::Tensor balance_sums(const BalanceOf& balance, const at::Tensor& logits_TE) {
  check_routed(logits_TE, balance.experts_TK);
  check_flags(balance.valid_T1, balance.experts_TK);
  const at::NoGradGuard no_grad;
  return kernels_for(logits_TE.device())
      .balance_sums(without_gaps(balance), logits_TE.contiguous());
}

at::Tensor balance_sums_backward(const BalanceOf& balance, const at::Tensor& logits_TE,
                                 const at::Tensor& d_sums_BE) {
  check_routed(logits_TE, balance.experts_TK);
  check_tensor("d_sums_BE", d_sums_BE, logits_TE.scalar_type(), 2);
  const at::NoGradGuard no_grad;
  return kernels_for(logits_TE.device())
      .balance_sums_backward(without_gaps(balance), logits_TE.contiguous(), d_sums_BE.contiguous());
}

TopK top_k(const at::Tensor& scores_TE, std::int64_t k) {
  MOESH_CHECK(scores_TE.defined() && scores_TE.dim() == 2 &&
                  (scores_TE.scalar_type() == at::kFloat || scores_TE.scalar_type() == at::kDouble),
              ErrorKind::data, "scores_TE is ", describe(scores_TE),
              "; pass float32 or float64 scores [tokens, experts]");
  MOESH_CHECK(k >= 1 && k <= scores_TE.size(1), ErrorKind::config, "top-k takes ", k, " of ",
              scores_TE.size(1), " experts; choose 1 to ", scores_TE.size(1));
  const at::NoGradGuard no_grad;
  return kernels_for(scores_TE.device()).top_k(scores_TE.contiguous(), k);
}

}  // namespace moesh::kernels
