#include "moesh/verify/probe.h"

#include <ATen/ATen.h>

namespace moesh::verify {
namespace {

// The tokens in which two choices differ, and by how much the choice scores differ there.
void note_flips(const nn::Choice& c, const at::Tensor& replayed_NK, RoutingRecord& record) {
  const at::Tensor own = std::get<0>(c.experts_NK.sort(-1)),
                   other = std::get<0>(replayed_NK.sort(-1));
  const at::Tensor differs = own.ne(other).any(-1);
  const auto count = differs.sum().item<std::int64_t>();
  if (count == 0) return;
  record.num_flipped += count;
  const at::Tensor worst_own = std::get<0>(c.scores_NE.gather(1, c.experts_NK).min(-1));
  const at::Tensor worst_other = std::get<0>(c.scores_NE.gather(1, replayed_NK).min(-1));
  // Between groups of experts the scores of those left out are infinite, and say nothing.
  const at::Tensor margins = (worst_own - worst_other).abs().masked_select(differs);
  const double margin =
      margins.masked_fill(margins.isfinite().logical_not(), 0).max().item<double>();
  double seen = record.largest_margin;
  while (margin > seen && !record.largest_margin.compare_exchange_weak(seen, margin)) {
  }
}

}  // namespace

RoutingRecord::RoutingRecord(std::int64_t num_tokens, std::int64_t top_k)
    : experts_TK(at::full({num_tokens, top_k}, -1, at::kLong)),
      for_balance_TK(experts_TK.clone()) {}

void VerifyProbe::on_input(const at::Tensor& x_BLD) {
  inputs.push_back(x_BLD);
  if (x_BLD.requires_grad()) x_BLD.retain_grad();
}

at::Tensor VerifyProbe::on_choice(const nn::Choice& c) {
  if (!record && !replay) return c.experts_NK;
  const auto layer = static_cast<size_t>(c.layer);
  const at::Tensor places = c.tokens.global_ids() + c.micro_batch * c.tokens.num_global();
  const auto recorded = [&](RoutingRecord& r) -> at::Tensor& {
    return c.for_balance ? r.for_balance_TK : r.experts_TK;
  };
  at::Tensor experts = c.experts_NK;
  if (replay) {
    RoutingRecord& from = *(*replay)[layer];
    experts = recorded(from).index_select(0, places).to(experts.device());
    if (c.pass != nn::Pass::recompute && !c.for_balance) note_flips(c, experts, from);
  }
  if (record && c.pass != nn::Pass::recompute)
    recorded(*(*record)[layer]).index_copy_(0, places, experts.cpu());
  return experts;
}

}  // namespace moesh::verify
