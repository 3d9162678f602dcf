#include "moesh/nn/dispatch.h"

#include <ATen/ATen.h>

#include <numeric>

#include "moesh/base/error.h"
#include "moesh/nn/rows.h"
#include "moesh/spmd/all_gather.h"
#include "moesh/spmd/all_to_all.h"
#include "moesh/spmd/cross.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/reduce_scatter.h"

namespace moesh::nn {
namespace {

using enum Place;
using Rows = std::vector<std::int64_t>;

// Who sends how many rows to whom, from one all_gather of every rank's counts over ep x etp.
struct Plan {
  Rows send, recv;       // rows of this rank's all_to_all over ep
  Rows parts;            // rows which each etp rank of this ep rank receives
  at::Tensor counts_se;  // rows for own expert e from source s, sources by (etp, ep): the order of
                         // arrival after the gather over etp
};

Plan make_plan(const at::Tensor& counts_E) {
  const auto& mesh = current_mesh();
  const auto num_ep = mesh.size(ep), num_etp = mesh.size(etp), my_ep = mesh.coordinate(ep),
             my_etp = mesh.coordinate(etp);
  const auto num_experts = counts_E.numel(), per_rank = num_experts / num_ep;
  const at::Tensor all = mesh.group(ep | etp)->all_gather(counts_E.reshape({1, num_experts})).cpu();
  // [origin ep, origin etp, owner ep, expert of the owner]
  const at::Tensor counts = all.reshape({num_ep, num_etp, num_ep, per_rank});
  const auto to_rows = [](const at::Tensor& t) {
    const at::Tensor c = t.contiguous();
    return Rows(c.const_data_ptr<std::int64_t>(), c.const_data_ptr<std::int64_t>() + c.numel());
  };
  const at::Tensor totals = counts.sum(-1);  // [origin ep, origin etp, owner ep]
  return {.send = to_rows(totals[my_ep][my_etp]),
          .recv = to_rows(totals.select(2, my_ep).select(1, my_etp)),
          .parts = to_rows(totals.select(2, my_ep).sum(0)),
          .counts_se = counts.select(2, my_ep)
                           .transpose(0, 1)
                           .reshape({num_ep * num_etp, per_rank})
                           .contiguous()};
}

PerToken by_all_to_all(const Experts& experts, const PerToken& x_ND, const Route& route,
                       const std::function<void()>& meanwhile) {
  const auto num_experts = experts.config().num_experts;
  const auto sorted = kernels::sort_by_expert(route.experts_NK, num_experts);
  const Plan plan = make_plan(sorted.counts_e);

  const auto rows =
      assume<Dense{T, T, T}>(spread_rows(local(x_ND), sorted.token_R, sorted.inverse_TK));
  const auto scores = assume<Dense{T, T, T}>(
      permute_rows(local(route.weights_NK).flatten(), sorted.order_R, sorted.inverse_TK.flatten()));
  auto moving_rows = start_to_experts<ep>(sparse(rows), plan.send, plan.recv);
  auto moving_scores = start_to_experts<ep>(sparse(scores), plan.send, plan.recv);
  meanwhile();
  const Along parts{.dim = 0, .sizes = plan.parts};
  // T,E,R: what a rank of etp finds for d(rows) and d(scores) is a partial sum, which the adjoint
  // of the gather takes.
  const auto rows_RD = all_gather<etp>(moving_rows.wait(), parts);
  const auto scores_R = all_gather<etp>(moving_scores.wait(), parts);

  const auto order = kernels::rank_major_to_expert_major(plan.counts_se, local(x_ND).device());
  const auto y_RD =
      reduce_scatter<etp>(experts.rows(rows_RD, scores_R, order), parts);  // T,E,P -> T,E,T
  const auto home = dense(to_owners<ep>(y_RD, plan.recv, plan.send));
  return assume<Dense{T, T, T}>(combine_rows(local(home), sorted.token_R, sorted.inverse_TK));
}

PerToken by_all_gather(const Experts& experts, const PerToken& x_ND, const Route& route,
                       const Tokens& tokens, const std::function<void()>& meanwhile) {
  meanwhile();
  auto& group = *current_mesh().group(ep | etp);
  const Along rows{.dim = 0, .sizes = tokens.rows(group)};
  const auto x = all_gather < ep | etp > (sparse(x_ND), rows);                   // T,R,R
  const auto scores = all_gather < ep | etp > (sparse(route.weights_NK), rows);  // T,R,R
  const at::Tensor chosen = group.all_gather(route.experts_NK, rows.sizes);
  return dense(reduce_scatter < ep |
               etp > (experts.share(x, scores, chosen), rows));  // T,P,P -> T,T,T
}

}  // namespace

const char* to_string(Dispatcher d) {
  switch (d) {
    case Dispatcher::automatic: return "auto";
    case Dispatcher::local: return "local";
    case Dispatcher::all_to_all: return "all_to_all";
    case Dispatcher::all_gather: return "all_gather";
  }
  return "unknown";
}

Dispatcher resolve(Dispatcher asked, const MeshShape& shape, std::int64_t top_k) {
  const int ranks = shape.ep * shape.etp;
  MOESH_CHECK(asked != Dispatcher::local || ranks == 1, ErrorKind::config,
              "dispatcher 'local' needs ep = etp = 1; here ep = ", shape.ep, ", etp = ", shape.etp,
              ". Use 'auto', 'all_to_all' or 'all_gather'.");
  if (asked != Dispatcher::automatic) return asked;
  if (ranks == 1) return Dispatcher::local;
  // Rows that leave a rank, per token and way: K rows over ep, each gathered by etp - 1 others; or
  // one row to every other rank.
  const double by_rows =
      static_cast<double>(top_k) * ((shape.ep - 1.0) / shape.ep + (shape.etp - 1.0));
  return by_rows < ranks - 1.0 ? Dispatcher::all_to_all : Dispatcher::all_gather;
}

PerToken dispatch(Dispatcher way, const Experts& experts, const PerToken& x_ND, const Route& route,
                  const Tokens& tokens, const std::function<void()>& meanwhile) {
  if (way == Dispatcher::all_to_all) return by_all_to_all(experts, x_ND, route, meanwhile);
  return by_all_gather(experts, x_ND, route, tokens,
                       meanwhile);  // `local` is the all_gather of one rank
}

}  // namespace moesh::nn
