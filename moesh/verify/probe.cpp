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

RoutingRecord::RoutingRecord(std::int64_t num_layers, std::int64_t num_tokens, std::int64_t top_k)
    : StepRouting{.experts_LTK = at::full({num_layers, num_tokens, top_k}, -1, at::kLong),
                  .for_balance_LTK = at::full({num_layers, num_tokens, top_k}, -1, at::kLong)} {}

void VerifyProbe::on_input(const at::Tensor& x_BLD) {
  inputs.push_back(x_BLD);
  if (x_BLD.requires_grad()) x_BLD.retain_grad();
}

at::Tensor VerifyProbe::on_choice(const nn::Choice& c) {
  at::Tensor experts_NK = RoutingProbe::on_choice(c);
  if (flips && c.pass != nn::Pass::recompute && !c.for_balance) note_flips(c, experts_NK, *flips);
  return experts_NK;
}

}  // namespace moesh::verify
