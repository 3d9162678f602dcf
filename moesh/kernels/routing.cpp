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
                            const at::Tensor& d_logits_TE) {
  check_gate(x_TD, gate_ED);
  MOESH_CHECK(d_logits_TE.defined() && d_logits_TE.dim() == 2 &&
                  d_logits_TE.size(0) == x_TD.size(0) && d_logits_TE.size(1) == gate_ED.size(0) &&
                  d_logits_TE.scalar_type() == gate_ED.scalar_type(),
              ErrorKind::data, "d_logits_TE is ", describe(d_logits_TE), "; the logits of x ",
              describe(x_TD), " and gate ", describe(gate_ED), " have a line for each token");
  const at::NoGradGuard no_grad;
  return kernels_for(x_TD.device())
      .gate_backward(x_TD.contiguous(), gate_ED.contiguous(), d_logits_TE.contiguous());
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
