// Rows go to the ranks of their experts, K rows a token, and are gathered over etp.
// N local tokens, D model, E experts, e local experts, K top-k, R rows at their experts

#include "moesh/spmd/all_to_all.h"

#include <ATen/ATen.h>

#include "moesh/kernels/rows.h"
#include "moesh/nn/dispatch/ways.h"
#include "moesh/nn/rows.h"
#include "moesh/spmd/cross.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"

namespace moesh::nn {
namespace {

using RowCounts = std::vector<std::int64_t>;

// Who sends how many rows to whom, from one all_gather of every rank's counts over ep x etp.
struct Traffic {
  RowCounts send, recv;  // rows of this rank's all_to_all over ep
  RowCounts gathered;    // rows which each etp rank of this ep rank receives
  at::Tensor counts_se;  // rows for own expert e from source s, sources by (etp, ep): the order of
                         // arrival after the gather over etp
};

Traffic count_traffic(const at::Tensor& counts_E) {
  const auto& mesh = current_mesh();
  const auto num_ep = mesh.size(ep), num_etp = mesh.size(etp), my_ep = mesh.coordinate(ep),
             my_etp = mesh.coordinate(etp);
  const auto num_experts = counts_E.numel(), per_rank = num_experts / num_ep;
  const at::Tensor all =
      mesh.group(kExpertAxes)->all_gather(counts_E.reshape({1, num_experts})).cpu();
  // [origin ep, origin etp, owner ep, expert of the owner]
  const at::Tensor counts = all.reshape({num_ep, num_etp, num_ep, per_rank});
  const auto to_rows = [](const at::Tensor& t) {
    const at::Tensor c = t.contiguous();
    const auto* first = c.const_data_ptr<std::int64_t>();
    return RowCounts(first, first + c.numel());
  };
  const at::Tensor totals = counts.sum(-1);  // [origin ep, origin etp, owner ep]
  return {.send = to_rows(totals[my_ep][my_etp]),
          .recv = to_rows(totals.select(2, my_ep).select(1, my_etp)),
          .gathered = to_rows(totals.select(2, my_ep).sum(0)),
          .counts_se = counts.select(2, my_ep)
                           .transpose(0, 1)
                           .reshape({num_ep * num_etp, per_rank})
                           .contiguous()};
}

class AllToAll final : public RoundTrip {
  PerToken routed(const DispatchInput& in, const std::function<void()>& meanwhile) const override {
    const auto sorted =
        kernels::sort_by_expert(local(in.route.experts_NK), in.experts.config().num_experts);
    const Traffic traffic = count_traffic(kernels::counts_of(sorted.ends_e));
    const auto rows = spread_rows(in.x_ND, sorted.token_R, sorted.inverse_TK);
    const auto scores = permute_rows(flatten(in.route.weights_NK, 0, 1), sorted.order_R,
                                     sorted.inverse_TK.flatten());
    auto moving = start_to_experts<ep>(traffic.send, traffic.recv, sparse(rows), sparse(scores));
    meanwhile();
    const auto [arrived_rows, arrived_scores] = moving.wait();
    // T,E,R: what a rank of etp finds for d(rows) and d(scores) is a partial sum, which the adjoint
    // of the gather takes.
    const auto [rows_RD, scores_R] =
        all_gather_together<etp>(traffic.gathered, arrived_rows, arrived_scores);
    const auto order =
        kernels::rank_major_to_expert_major(traffic.counts_se, local(in.x_ND).device());
    const auto y_RD = reduce_scatter<etp>(in.experts.apply_to_rows(rows_RD, scores_R, order),
                                          {.dim = 0, .sizes = traffic.gathered});  // T,E,P -> T,E,T
    const auto home = dense(to_owners<ep>(y_RD, traffic.recv, traffic.send));
    return combine_rows(home, sorted.token_R, sorted.inverse_TK);
  }
};

}  // namespace

std::unique_ptr<const Dispatch> make_all_to_all() { return std::make_unique<AllToAll>(); }

}  // namespace moesh::nn
