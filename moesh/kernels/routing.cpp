#include "moesh/kernels/routing.h"

#include <ATen/ops/diff.h>
#include <ATen/ops/zeros.h>

#include <limits>

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
  return call(x_TD.device(), &KernelTable::gate_forward, x_TD, gate_ED);
}

GateGradients gate_backward(const at::Tensor& x_TD, const at::Tensor& gate_ED,
                            const at::Tensor& d_logits_TE, bool as_product) {
  check_gate(x_TD, gate_ED);
  MOESH_CHECK(d_logits_TE.defined() && d_logits_TE.dim() == 2 &&
                  d_logits_TE.size(0) == x_TD.size(0) && d_logits_TE.size(1) == gate_ED.size(0) &&
                  d_logits_TE.scalar_type() == gate_ED.scalar_type(),
              ErrorKind::data, "d_logits_TE is ", describe(d_logits_TE), "; the logits of x ",
              describe(x_TD), " and gate ", describe(gate_ED), " have a line for each token");
  return call(x_TD.device(), &KernelTable::gate_backward, x_TD, gate_ED, d_logits_TE, as_product);
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

BalanceOf without_gaps(const BalanceOf& b) {
  return {b.softmax, plain(b.experts_TK), plain(b.valid_T1), b.members_BT, b.equal_runs};
}

}  // namespace

at::Tensor weigh_forward(const Weighing& weighing, const at::Tensor& logits_TE,
                         const at::Tensor& experts_TK) {
  check_routed(logits_TE, experts_TK);
  return call(logits_TE.device(), &KernelTable::weigh_forward, weighing, logits_TE, experts_TK);
}

at::Tensor weigh_backward(const Weighing& weighing, const at::Tensor& logits_TE,
                          const at::Tensor& experts_TK, const at::Tensor& d_weights_TK) {
  check_routed(logits_TE, experts_TK);
  check_tensor("d_weights_TK", d_weights_TK, logits_TE.scalar_type(), 2);
  MOESH_CHECK(d_weights_TK.sizes() == experts_TK.sizes(), ErrorKind::data, "d_weights_TK is ",
              describe(d_weights_TK), " for choices ", describe(experts_TK));
  return call(logits_TE.device(), &KernelTable::weigh_backward, weighing, logits_TE, experts_TK,
              d_weights_TK);
}

at::Tensor count_choices(const at::Tensor& experts_TK, const at::Tensor& valid_T1,
                         std::int64_t num_experts) {
  check_tensor("experts_TK", experts_TK, at::kLong, 2);
  check_flags(valid_T1, experts_TK);
  return call(experts_TK.device(), &KernelTable::count_choices, experts_TK, valid_T1, num_experts);
}

at::Tensor balance_sums(const BalanceOf& balance, const at::Tensor& logits_TE) {
  check_routed(logits_TE, balance.experts_TK);
  check_flags(balance.valid_T1, balance.experts_TK);
  return call(logits_TE.device(), &KernelTable::balance_sums, without_gaps(balance), logits_TE);
}

at::Tensor balance_sums_backward(const BalanceOf& balance, const at::Tensor& logits_TE,
                                 const at::Tensor& d_sums_BE) {
  check_routed(logits_TE, balance.experts_TK);
  check_tensor("d_sums_BE", d_sums_BE, logits_TE.scalar_type(), 2);
  return call(logits_TE.device(), &KernelTable::balance_sums_backward, without_gaps(balance),
              logits_TE, d_sums_BE);
}

TopK top_k(const at::Tensor& scores_TE, std::int64_t k) {
  MOESH_CHECK(scores_TE.defined() && scores_TE.dim() == 2 &&
                  (scores_TE.scalar_type() == at::kFloat || scores_TE.scalar_type() == at::kDouble),
              ErrorKind::data, "scores_TE is ", describe(scores_TE),
              "; pass float32 or float64 scores [tokens, experts]");
  MOESH_CHECK(k >= 1 && k <= scores_TE.size(1), ErrorKind::config, "top-k takes ", k, " of ",
              scores_TE.size(1), " experts; choose 1 to ", scores_TE.size(1));
  return call(scores_TE.device(), &KernelTable::top_k, scores_TE, k);
}

namespace {

void check_num_rows(std::int64_t num_rows) {
  MOESH_CHECK(num_rows <= std::numeric_limits<std::int32_t>::max(), ErrorKind::data, num_rows,
              " rows on one rank; their indices have 32 bits. Use smaller micro-batches.");
}

}  // namespace

Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts, ExpertRange range) {
  check_tensor("experts_TK", experts_TK, at::kLong, 2);
  MOESH_CHECK(experts_TK.size(1) >= 1, ErrorKind::data, "experts_TK is ", describe(experts_TK),
              "; each token chooses 1 expert or more");
  MOESH_CHECK(range.first >= 0 && range.count >= 0 && range.first + range.count <= num_experts,
              ErrorKind::config, "experts [", range.first, ", ", range.first + range.count,
              ") are not among ", num_experts, " experts");
  check_num_rows(experts_TK.numel());
  return call(experts_TK.device(), &KernelTable::sort_by_expert, experts_TK, num_experts, range);
}

Reordered rank_major_to_expert_major(const at::Tensor& counts_re, at::Device device) {
  check_tensor("counts_re", counts_re, at::kLong, 2);
  MOESH_CHECK(counts_re.is_cpu(), ErrorKind::data, "counts_re is on ", counts_re.device(),
              "; counts belong on the host");
  const at::Tensor counts = counts_re.contiguous();
  const std::int64_t num_experts = counts.size(1);
  const auto* count = counts.const_data_ptr<std::int64_t>();
  std::int64_t num_rows = 0;
  for (std::int64_t i = 0; i < counts.numel(); ++i) {
    MOESH_CHECK(count[i] >= 0, ErrorKind::data, "rank ", i / num_experts, " announces ", count[i],
                " rows for expert ", i % num_experts);
    num_rows += count[i];
  }
  check_num_rows(num_rows);
  return call(device, &KernelTable::rank_major_to_expert_major, counts, device);
}

at::Tensor counts_of(const at::Tensor& ends_e) {
  const at::NoGradGuard no_grad;
  return at::diff(ends_e, /*n=*/1, /*dim=*/0, at::zeros({1}, ends_e.options())).to(at::kLong);
}

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index_R) {
  MOESH_CHECK(x.defined() && (x.dim() == 1 || x.dim() == 2), ErrorKind::data, "x is ", describe(x),
              "; pass [rows] or [rows, columns]");
  check_tensor("index_R", index_R, at::kInt, 1);
  check_same_device("index_R", index_R, "x", x);
  return call(x.device(), &KernelTable::gather_rows, x, index_R);
}

at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK) {
  MOESH_CHECK(rows_RD.defined() && (rows_RD.dim() == 1 || rows_RD.dim() == 2) &&
                  is_kernel_dtype(rows_RD.scalar_type()),
              ErrorKind::data, "rows_RD is ", describe(rows_RD),
              "; pass float64, float32 or bfloat16 of 1 or 2 dimensions");
  check_tensor("inverse_TK", inverse_TK, at::kInt, 2);
  check_same_device("inverse_TK", inverse_TK, "rows_RD", rows_RD);
  return call(rows_RD.device(), &KernelTable::combine_rows, rows_RD, inverse_TK);
}

}  // namespace moesh::kernels
