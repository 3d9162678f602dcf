// Top-k, sorting and moving of rows with LibTorch ops.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_embedding_bag_forward_only.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "moesh/base/error.h"
#include "moesh/kernels/aten/aten.h"

namespace moesh::kernels::aten {

TopK top_k(const at::Tensor& scores_TE, std::int64_t k) {
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

Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts, ExpertRange range) {
  const auto options = experts_TK.options();
  const std::int64_t k = experts_TK.size(1);
  const at::Tensor flat_N = experts_TK.flatten(), local_N = flat_N - range.first;
  const at::Tensor outside_N = at::logical_or(local_N < 0, local_N >= range.count);
  const at::Tensor key_N =
      local_N.masked_fill(outside_N, range.count);  // what is not ours sorts last
  const auto [sorted_N, order_N] =
      at::sort(key_N, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor first = at::searchsorted(
      sorted_N, at::arange(range.count + 1, options));  // [e + 1] first row of each expert
  const at::Tensor bad = at::logical_or(flat_N < 0, flat_N >= num_experts).any().to(at::kLong);
  const at::Tensor facts = at::stack({first[range.count], bad}).cpu();  // one wait for the device
  if (facts[1].item<std::int64_t>()) {
    const std::int64_t i =
        at::nonzero(at::logical_or(flat_N < 0, flat_N >= num_experts))[0][0].item<std::int64_t>();
    MOESH_CHECK(false, ErrorKind::data, "token ", i / k, " chose expert ",
                flat_N[i].item<std::int64_t>(), " of ", num_experts, " (choice ", i % k, ")");
  }
  const std::int64_t num_rows = facts[0].item<std::int64_t>();
  at::Tensor inverse_N = at::empty_like(flat_N);
  inverse_N.scatter_(0, order_N, at::arange(flat_N.numel(), options));
  if (num_rows < flat_N.numel()) inverse_N.masked_fill_(inverse_N >= num_rows, -1);
  Sorted out;
  out.order_R = order_N.narrow(0, 0, num_rows).contiguous();
  out.token_R = out.order_R.div(k, "floor");
  out.inverse_TK = inverse_N.view_as(experts_TK);
  out.counts_e = first.slice(0, 1) - first.slice(0, 0, range.count);
  return out;
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
    const auto wide = rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    y = at::zeros({num_tokens, rows.size(1)}, rows.options().dtype(wide));
    for (std::int64_t i = 0; i < k; ++i) y.add_(gather_rows(rows, inverse_TK.select(1, i)));
    y = y.to(rows.scalar_type());
  }
  return rows_RD.dim() == 2 ? y : y.squeeze(1);
}

}  // namespace moesh::kernels::aten
