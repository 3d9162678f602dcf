// The gate, top-k, sorting and moving of rows with LibTorch ops.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/_embedding_bag_forward_only.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "moesh/base/error.h"
#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels::aten {

TopK top_k(const at::Tensor& scores_TE, std::int64_t k) {
  // A wait for the device: the error names the token, and a NaN must not reach the weights.
  const at::Tensor bad_T = at::isnan(scores_TE).any(1);
  if (scores_TE.size(0) > 0 && bad_T.any().item<bool>()) {
    MOESH_CHECK(
        false, ErrorKind::data, "the router scores of token ",
        at::nonzero(bad_T)[0][0].item<std::int64_t>(),
        " hold a NaN; look for a non-finite value in the token's input or in the gate weight");
  }
  // topk promises nothing about ties; a stable sort keeps the lower expert first.
  const auto [values, experts] =
      at::sort(scores_TE, /*stable=*/true, /*dim=*/1, /*descending=*/true);
  return {values.narrow(1, 0, k).contiguous(), experts.narrow(1, 0, k).contiguous()};
}

namespace {

void check_choices(const at::Tensor& flat_N, std::int64_t num_experts, std::int64_t k) {
  const at::Tensor bad_N = at::logical_or(flat_N < 0, flat_N >= num_experts);
  if (!flat_N.is_cpu())  // the host would wait for the answer: the device stops by itself
    return at::_assert_async(bad_N.any().logical_not(), "a token chose an expert out of range");
  if (!bad_N.any().item<bool>()) return;
  const std::int64_t i = at::nonzero(bad_N)[0][0].item<std::int64_t>();
  MOESH_CHECK(false, ErrorKind::data, "token ", i / k, " chose expert ",
              flat_N[i].item<std::int64_t>(), " of ", num_experts, " (choice ", i % k, ")");
}

}  // namespace

Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts, ExpertRange range) {
  const auto int32s = experts_TK.options().dtype(at::kInt);
  const std::int64_t k = experts_TK.size(1), num_routed = experts_TK.numel();
  const at::Tensor flat_N = experts_TK.flatten(), local_N = flat_N - range.first;
  check_choices(flat_N, num_experts, k);
  const at::Tensor outside_N = at::logical_or(local_N < 0, local_N >= range.count);
  const at::Tensor key_N =
      local_N.masked_fill(outside_N, range.count);  // what is not in the range sorts last
  const auto [sorted_N, order_N] =
      at::sort(key_N, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  Sorted out;
  out.ends_e = at::searchsorted(sorted_N, at::arange(range.count, experts_TK.options()),
                                /*out_int32=*/true, /*right=*/true);
  std::int64_t num_rows = num_routed;
  // The number of rows of a part of the experts is the size of all that follows: a wait.
  if (range.count < num_experts)
    num_rows = range.count > 0 ? out.ends_e[range.count - 1].item<std::int32_t>() : 0;
  out.inverse_TK = at::empty(experts_TK.sizes(), int32s);
  out.inverse_TK.view({num_routed}).scatter_(0, order_N, at::arange(num_routed, int32s));
  if (num_rows < num_routed) out.inverse_TK.masked_fill_(out.inverse_TK >= num_rows, -1);
  out.order_R = order_N.narrow(0, 0, num_rows).to(at::kInt);
  out.token_R = out.order_R.div(k, "floor");
  return out;
}

// The host knows the counts: it makes four numbers for each (expert, rank) and sends these, and the
// device makes the rows of them.
Reordered rank_major_to_expert_major(const at::Tensor& counts_re, at::Device device) {
  const at::Tensor counts_er = counts_re.t();
  const auto starts = [](const at::Tensor& counts) {
    const at::Tensor flat = counts.flatten();
    return (flat.cumsum(0) - flat).view_as(counts);
  };
  const at::Tensor shift_er = starts(counts_re).t() - starts(counts_er);  // from expert-major on
  const at::Tensor ends_e = counts_er.sum(1).cumsum(0);
  const std::int64_t num_rows = counts_re.sum().item<std::int64_t>(), n = counts_re.numel();
  at::Tensor sent = at::cat({counts_er.flatten(), shift_er.flatten(), counts_re.flatten(),
                             shift_er.t().neg().flatten(), ends_e})
                        .to(at::kInt);
  if (device.is_cuda()) sent = sent.pin_memory();  // the host does not wait until it has arrived
  sent = sent.to(device, /*non_blocking=*/true);
  const at::Tensor rows_R = at::arange(num_rows, sent.options());
  const auto shifted = [&](std::int64_t part) {
    const at::Tensor counts = sent.narrow(0, part * n, n), shift = sent.narrow(0, part * n + n, n);
    return rows_R + at::repeat_interleave(shift, counts, /*dim=*/0, /*output_size=*/num_rows);
  };
  return {.index_R = shifted(0),
          .inverse_R = shifted(2),
          .ends_e = sent.narrow(0, 4 * n, counts_re.size(1))};
}

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index_R) {
  auto sizes = x.sizes().vec();
  sizes[0] = index_R.numel();
  if (x.size(0) == 0) return at::zeros(sizes, x.options());
  at::Tensor none = index_R < 0;
  if (x.dim() == 2) none = none.unsqueeze(1);
  return x.index_select(0, index_R.clamp_min(0)).masked_fill_(none, 0);
}

at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK) {
  const at::Tensor rows = rows_RD.dim() == 2 ? rows_RD : rows_RD.unsqueeze(1);
  const std::int64_t num_tokens = inverse_TK.size(0), k = inverse_TK.size(1);
  at::Tensor y;
  if (rows.size(0) == 0 || num_tokens == 0) {
    y = at::zeros({num_tokens, rows.size(1)}, rows.options());
  } else if (rows.size(0) == inverse_TK.numel()) {
    // Every place holds a row: one pass which sums bags of k rows, in order, in the accumulation
    // type.
    y = std::get<0>(at::_embedding_bag_forward_only(
        rows, inverse_TK.flatten(), at::arange(0, num_tokens * k, k, inverse_TK.options())));
  } else {
    y = at::zeros({num_tokens, rows.size(1)}, rows.options().dtype(wide(rows)));
    for (std::int64_t i = 0; i < k; ++i) y.add_(gather_rows(rows, inverse_TK.select(1, i)));
    y = y.to(rows.scalar_type());
  }
  return rows_RD.dim() == 2 ? y : y.squeeze(1);
}

at::Tensor gate_forward(const at::Tensor& x_TD, const at::Tensor& gate_ED) {
  return at::mm(x_TD.to(gate_ED.scalar_type()), gate_ED.t());
}

GateGradients gate_backward(const at::Tensor& x_TD, const at::Tensor& gate_ED,
                            const at::Tensor& d_logits_TE, bool /*as_product*/) {
  return {at::mm(d_logits_TE, gate_ED).to(x_TD.scalar_type()),
          at::mm(d_logits_TE.t(), x_TD.to(gate_ED.scalar_type()))};
}

namespace {

at::Tensor scores_of(const Weighing& w, const at::Tensor& logits_TE, const at::Tensor& experts_TK) {
  if (w.scoring == Scoring::softmax_chosen) return logits_TE.gather(1, experts_TK).softmax(-1);
  return (w.scoring == Scoring::sigmoid ? logits_TE.sigmoid() : logits_TE.softmax(-1))
      .gather(1, experts_TK);
}

// The adjoint of a softmax with the result p.
at::Tensor softmax_backward(const at::Tensor& p, const at::Tensor& dp) {
  return p * (dp - (dp * p).sum(-1, true));
}

}  // namespace

at::Tensor weigh_forward(const Weighing& w, const at::Tensor& logits_TE,
                         const at::Tensor& experts_TK) {
  at::Tensor weights = scores_of(w, logits_TE, experts_TK);
  if (w.normalize) weights = weights / (weights.sum(-1, true) + w.epsilon);
  return w.scale != 1 ? weights * w.scale : weights;
}

at::Tensor weigh_backward(const Weighing& w, const at::Tensor& logits_TE,
                          const at::Tensor& experts_TK, const at::Tensor& d_weights_TK) {
  const at::Tensor s = scores_of(w, logits_TE, experts_TK);
  at::Tensor ds = d_weights_TK * w.scale;
  if (w.normalize) {
    const at::Tensor sum = s.sum(-1, true) + w.epsilon;
    ds = (ds - (ds * s).sum(-1, true) / sum) / sum;
  }
  const auto spread = [&](const at::Tensor& x_TK) {
    return at::zeros_like(logits_TE).scatter_add_(1, experts_TK, x_TK);
  };
  switch (w.scoring) {
    case Scoring::sigmoid: return spread(ds * s * (1 - s));
    case Scoring::softmax: return softmax_backward(logits_TE.softmax(-1), spread(ds));
    case Scoring::softmax_chosen: return spread(softmax_backward(s, ds));
  }
  return {};
}

at::Tensor count_choices(const at::Tensor& experts_TK, const at::Tensor& valid_T1,
                         std::int64_t num_experts) {
  // What does not count chooses one more expert, which is ignored.
  at::Tensor outside = at::logical_or(experts_TK < 0, experts_TK >= num_experts);
  if (valid_T1.defined()) outside = at::logical_or(outside, valid_T1.logical_not());
  const at::Tensor counted = experts_TK.masked_fill(outside, num_experts);
  // Not bincount, for whose answer the host waits for an accelerator. Whole numbers add up to the
  // same in any order; those of 32 bits have an addition of their own there.
  const at::Tensor one = at::ones({1}, counted.options().dtype(at::kInt));
  return at::zeros({num_experts + 1}, one.options())
      .scatter_add_(0, counted.flatten(), one.expand({counted.numel()}))
      .narrow(0, 0, num_experts)
      .to(at::kLong);
}

namespace {

// Shares of sigmoids whose sum nearly vanishes stay shares.
constexpr double kLeastScores = 1e-20;

at::Tensor of_valid(const BalanceOf& b, const at::Tensor& x_TE) {
  return b.valid_T1.defined() ? x_TE * b.valid_T1 : x_TE;
}

}  // namespace

at::Tensor balance_sums(const BalanceOf& b, const at::Tensor& logits_TE) {
  at::Tensor p_TE = b.softmax ? logits_TE.softmax(-1) : logits_TE.sigmoid();
  if (!b.softmax) p_TE = p_TE / (p_TE.sum(-1, true) + kLeastScores);
  const at::Tensor chosen_TE = at::zeros_like(logits_TE).scatter_(1, b.experts_TK, 1);
  return at::stack(
      {b.members_BT.matmul(of_valid(b, p_TE)), b.members_BT.matmul(of_valid(b, chosen_TE))});
}

at::Tensor balance_sums_backward(const BalanceOf& b, const at::Tensor& logits_TE,
                                 const at::Tensor& d_sums_BE) {
  const at::Tensor dp_TE = of_valid(b, b.members_BT.t().matmul(d_sums_BE));
  if (b.softmax) return softmax_backward(logits_TE.softmax(-1), dp_TE);
  const at::Tensor s_TE = logits_TE.sigmoid(), sum = s_TE.sum(-1, true) + kLeastScores;
  return (dp_TE - (dp_TE * s_TE).sum(-1, true) / sum) / sum * s_TE * (1 - s_TE);
}

void add_routing(KernelTable& t) {
  t.weigh_forward = weigh_forward;
  t.weigh_backward = weigh_backward;
  t.count_choices = count_choices;
  t.balance_sums = balance_sums;
  t.balance_sums_backward = balance_sums_backward;
  t.top_k = top_k;
  t.sort_by_expert = sort_by_expert;
  t.rank_major_to_expert_major = rank_major_to_expert_major;
  t.gate_forward = gate_forward;
  t.gate_backward = gate_backward;
  t.gather_rows = gather_rows;
  t.combine_rows = combine_rows;
}

}  // namespace moesh::kernels::aten
