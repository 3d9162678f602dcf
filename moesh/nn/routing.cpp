#include "moesh/nn/routing.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <span>

#include "moesh/base/error.h"

namespace moesh::nn {
namespace {

const at::Tensor& of_choice(const StepRouting& r, const Choice& c) {
  return c.for_balance ? r.for_balance_LTK : r.experts_LTK;
}

bool is_left_to_router(std::span<const std::int64_t> experts) {
  return std::ranges::all_of(experts, [](std::int64_t e) { return e == -1; });
}

bool are_different_experts(std::span<const std::int64_t> experts, std::int64_t num_experts) {
  for (std::size_t k = 0; k < experts.size(); ++k)
    if (experts[k] < 0 || experts[k] >= num_experts ||
        std::ranges::count(experts.first(k), experts[k]) > 0)
      return false;
  return true;
}

// int64 [N, K], on the device of the choice.
at::Tensor replayed(const StepRouting& from, const Choice& c) {
  const at::Tensor& all_LTK = of_choice(from, c);
  if (!all_LTK.defined()) return c.experts_NK;
  const at::Tensor places = places_in_step(c),
                   given_NK = all_LTK.select(0, c.layer).index_select(0, places).to(at::kLong);
  const std::int64_t num_experts = c.scores_NE.size(1);
  bool any_left = false;
  for (std::int64_t n = 0; n < given_NK.size(0); ++n) {
    const std::span experts(given_NK.const_data_ptr<std::int64_t>() + n * given_NK.size(1),
                            static_cast<std::size_t>(given_NK.size(1)));
    if (is_left_to_router(experts)) {
      any_left = true;
      continue;
    }
    MOESH_CHECK(are_different_experts(experts, num_experts), ErrorKind::data, from.name, ": token ",
                places[n].item<std::int64_t>(), " of layer ", c.layer, " has the experts ",
                at::IntArrayRef(experts.data(), experts.size()), "; it takes ", experts.size(),
                " different ones of 0 to ", num_experts - 1,
                ", or only -1, and the router chooses");
  }
  const at::Tensor given = given_NK.to(c.experts_NK.device());
  return any_left ? at::where(given.lt(0), c.experts_NK, given) : given;
}

}  // namespace

at::Tensor places_in_step(const Choice& c) {
  return c.tokens.global_ids() + c.micro_batch * c.tokens.num_global();
}

at::Tensor RoutingProbe::on_choice(const Choice& c) {
  const at::Tensor experts_NK = replay ? replayed(*replay, c) : c.experts_NK;
  if (record && c.pass != Pass::recompute && of_choice(*record, c).defined()) {
    at::Tensor to_TK = of_choice(*record, c).select(0, c.layer);
    to_TK.index_copy_(0, places_in_step(c), experts_NK.to(at::kCPU, to_TK.scalar_type()));
  }
  return experts_NK;
}

}  // namespace moesh::nn
