// The ways to dispatch: rows go to their experts and come home.
// N local tokens, D model, E experts, e local experts, K top-k, R rows at their experts

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <cmath>
#include <functional>
#include <optional>

#include "moesh/base/error.h"
#include "moesh/base/timeline.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/kernels/routing.h"
#include "moesh/nn/dispatch.h"
#include "moesh/nn/experts.h"
#include "moesh/nn/residual.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/rows.h"
#include "moesh/spmd/transitions.h"

namespace moesh::nn {

SplitDim rows_over_tp(const Tokens& tokens) {
  return {.dim = 0, .sizes = tokens.rows(*current_mesh().group(tp))};
}

namespace {

// The chosen experts as they travel, in half the bytes, and what came of them.
PerToken numbers(const Route& route) { return cast(route.experts_NK, at::kInt); }
template <class Rows>
at::Tensor experts_of(const Rows& numbers_NK) {
  return local(numbers_NK).to(at::kLong);
}

// Takes own tokens to their experts and back home; the shared experts work while rows are on their
// way.
class RoundTrip : public Dispatch {
 public:
  Stream<true> operator()(const DispatchInput& in, const Stream<true>& x_ND) const final {
    const SplitDim rows = rows_over_tp(in.tokens);
    Stream<true> shared;
    const PerToken y = of_routed(in, [&] {
      if (in.shared)
        shared = to_stream<true>(
            (*in.shared)(to_full<true>(x_ND, rows), in.tokens.gathered_numbers()), rows);
    });
    return in.shared ? y + shared : y;
  }

  Stream<false> operator()(const DispatchInput& in, const Stream<false>& x_ND) const final {
    const SplitDim rows = rows_over_tp(in.tokens);
    std::optional<Sum> shared;
    const PerToken y = of_routed(in, [&] {
      if (in.shared)
        shared = (*in.shared)(to_full<false>(x_ND, rows), in.tokens.gathered_numbers());
    });
    // One reduction ends both.
    return shared ? to_stream<false>(*shared + pad<tp>(y, rows), rows)
                  : all_gather<tp, Place::I>(y, rows);
  }

 private:
  PerToken of_routed(const DispatchInput& in, const std::function<void()>& meanwhile) const {
    return with_coded_gradient(routed(in, meanwhile), in.codec);
  }

  // The outputs of the routed experts. `meanwhile` is called once, while rows travel.
  virtual PerToken routed(const DispatchInput& in,
                          const std::function<void()>& meanwhile) const = 0;
};

// ep = etp = 1: this rank has all experts, and nothing moves.
class Local final : public RoundTrip {
  PerToken routed(const DispatchInput& in, const std::function<void()>& meanwhile) const override {
    meanwhile();
    // On one rank a gather and a reduction give back what they get.
    const SplitDim rows{.dim = 0};
    const auto x = all_gather<kExpertAxes>(sparse(decoded(coded(in.x_ND, in.codec))), rows);
    const auto scores = all_gather<kExpertAxes>(sparse(in.route.weights_NK), rows);
    const auto y = in.experts.apply_to_tokens(x, scores, local(in.route.experts_NK));
    return dense(reduce_scatter<kExpertAxes>(y, rows));
  }
};

using RowCounts = std::vector<std::int64_t>;

// Counts on the host as a list.
RowCounts row_counts(const at::Tensor& counts) {
  const at::Tensor c = counts.contiguous();
  const auto* first = c.const_data_ptr<std::int64_t>();
  return RowCounts(first, first + c.numel());
}

// The host waits for the device, which a trace shows by this name.
at::Tensor read_counts(const at::Tensor& counts) {
  RECORD_USER_SCOPE(kReadCounts);
  return counts.cpu();
}

// How many rows each rank sends to each other, from one all_gather of every rank's counts.
struct RowTraffic {
  RowCounts send, recv;  // rows of this rank's all_to_all
  RowCounts gathered;    // rows which each etp rank of this place receives
  at::Tensor counts_se;  // rows for own expert e from source s, sources by (etp, place): the order
                         // of arrival after the gather over etp
};

// Among the ranks of ep, or those of it on this node (ep_inside), which have the counted experts.
RowTraffic count_traffic(const at::Tensor& counts_E, Axes places) {
  const auto& mesh = current_mesh();
  const auto num_ep = mesh.size(places), num_etp = mesh.size(etp), my_ep = mesh.coordinate(places),
             my_etp = mesh.coordinate(etp);
  const auto num_experts = counts_E.numel(), per_rank = num_experts / num_ep;
  const at::Tensor all =
      read_counts(mesh.group(places | etp)->all_gather(counts_E.reshape({1, num_experts})));
  // [origin ep, origin etp, owner ep, expert of the owner]
  const at::Tensor counts = all.reshape({num_ep, num_etp, num_ep, per_rank});
  const at::Tensor totals = counts.sum(-1);  // [origin ep, origin etp, owner ep]
  return {.send = row_counts(totals[my_ep][my_etp]),
          .recv = row_counts(totals.select(2, my_ep).select(1, my_etp)),
          .gathered = row_counts(totals.select(2, my_ep).sum(0)),
          .counts_se = counts.select(2, my_ep)
                           .transpose(0, 1)
                           .reshape({num_ep * num_etp, per_rank})
                           .contiguous()};
}

// Rows that came to the ranks of their experts, or their scores.
using AtExperts = Tensor<Sparse{Place::T, Place::E, Place::T}>;

// The outputs of rows, in their order; etp ranks compute theirs together.
AtExperts apply_at_experts(const Experts& experts, const Coded<AtExperts>& rows_RD,
                           const AtExperts& scores_R, const RowTraffic& traffic) {
  // T,E,R: what a rank of etp finds for d(rows) and d(scores) is a partial sum, which the adjoint
  // of the gather takes.
  const auto [rows, scores] = all_gather_together<etp>(traffic.gathered, rows_RD, scores_R);
  const auto order =
      kernels::rank_major_to_expert_major(traffic.counts_se, local(scores_R).device());
  return reduce_scatter<etp>(experts.apply_to_rows(decoded(rows), scores, order),
                             {.dim = 0, .sizes = traffic.gathered},
                             rows_RD.codec());  // T,E,P -> T,E,T
}

// Rows go to the ranks of their experts, K rows a token, and are gathered over etp.
class AllToAll final : public RoundTrip {
  PerToken routed(const DispatchInput& in, const std::function<void()>& meanwhile) const override {
    return in.dy_ND ? run(in, meanwhile, *in.dy_ND) : run(in, meanwhile);
  }

  template <class... Gradient>
  static PerToken run(const DispatchInput& in, const std::function<void()>& meanwhile,
                      const Gradient&... dy_ND) {
    const auto sorted =
        kernels::sort_by_expert(local(in.route.experts_NK), in.experts.config().num_experts);
    const RowTraffic traffic =
        computed_once([&] { return count_traffic(kernels::counts_of(sorted.ends_e), ep); });
    const auto spread = [&](const PerToken& x) {
      return sparse(spread_rows(coded(x, in.codec), sorted.token_R, sorted.inverse_TK));
    };
    auto moving =
        start_to_experts<ep>(traffic.send, traffic.recv, spread(in.x_ND),
                             sparse(scores_of_rows(in.route.weights_NK, sorted)), spread(dy_ND)...);
    meanwhile();
    const auto there = moving.wait();
    const auto y_RD = apply_at_experts(in.experts, std::get<0>(there), std::get<1>(there), traffic);
    if constexpr (sizeof...(dy_ND) > 0) {
      return dense(at_home<ep>(y_RD, decoded(std::get<2>(there)), local(in.x_ND).sizes()));
    } else {
      const auto home =
          dense(start_to_owners<ep>(y_RD, traffic.recv, traffic.send, in.codec).wait());
      return combine_rows(home, sorted.token_R, sorted.inverse_TK);
    }
  }
};

// On meta, where choices have no values: as if the rows were spread evenly over the bins.
kernels::Sorted spread_evenly(std::int64_t num_rows, std::int64_t num_bins,
                              at::IntArrayRef choices) {
  const auto meta = at::TensorOptions(at::kMeta);
  auto sorted = kernels::sort_by_expert(at::empty({num_rows, 1}, meta.dtype(at::kLong)), num_bins);
  sorted.inverse_TK = at::empty(choices, meta.dtype(at::kInt));
  return sorted;
}

// Rows to and from each node, by the rank in this rank's place there.
struct NodeTraffic {
  RowCounts send, recv;
};

NodeTraffic count_node_traffic(const at::Tensor& counts_n) {
  const auto& group = current_mesh().group(ep_nodes);
  // [from, to]
  const at::Tensor counts_nn =
      read_counts(group->all_gather(counts_n.reshape({1, counts_n.numel()})));
  return {.send = row_counts(counts_nn[group->rank()]),
          .recv = row_counts(counts_nn.select(1, group->rank()))};
}

// A token goes once to each node that has one of its experts, to the rank in the same place there,
// and from there to the ranks of its experts. On the way back its rows are summed on the node, and
// one row a node goes home. n nodes, M tokens that came to this rank
class TwoHops final : public RoundTrip {
 public:
  explicit TwoHops(const RouterConfig& router) : router_(router) {}

 private:
  PerToken routed(const DispatchInput& in, const std::function<void()>& meanwhile) const override {
    return in.dy_ND ? run(in, meanwhile, *in.dy_ND) : run(in, meanwhile);
  }

  template <class... Gradient>
  PerToken run(const DispatchInput& in, const std::function<void()>& meanwhile,
               const Gradient&... dy_ND) const {
    // To the nodes.
    const auto to_nodes = sort_by_node(local(in.route.experts_NK));
    const NodeTraffic hop =
        computed_once([&] { return count_node_traffic(kernels::counts_of(to_nodes.ends_e)); });
    const auto spread = [&](const auto& x) {
      return sparse(spread_rows(x, to_nodes.token_R, to_nodes.inverse_TK));
    };
    auto moving = start_to_nodes(hop.send, hop.recv, spread(coded(in.x_ND, in.codec)),
                                 spread(in.route.weights_NK), spread(numbers(in.route)),
                                 spread(coded(dy_ND, in.codec))...);
    meanwhile();
    const auto at_nodes = moving.wait();
    const auto &scores_MK = std::get<1>(at_nodes), &chosen_MK = std::get<2>(at_nodes);
    // To the experts, and back.
    const auto sorted = sort_on_node(experts_of(chosen_MK), local(in.x_ND).size(0));
    const RowTraffic inside =
        computed_once([&] { return count_traffic(kernels::counts_of(sorted.ends_e), ep_inside); });
    const auto spread_inside = [&](const auto& x_MD) {
      return spread_rows(x_MD, sorted.token_R, sorted.inverse_TK);
    };
    const auto go_inside = [&](const auto&... dy_MD) {
      return start_to_experts(inside.send, inside.recv, spread_inside(std::get<0>(at_nodes)),
                              scores_of_rows(scores_MK, sorted), spread_inside(dy_MD)...)
          .wait();
    };
    if constexpr (sizeof...(dy_ND) > 0) {
      const auto there = go_inside(std::get<3>(at_nodes));
      const auto y_RD =
          apply_at_experts(in.experts, std::get<0>(there), std::get<1>(there), inside);
      return dense(at_home<ep>(y_RD, decoded(std::get<2>(there)), local(in.x_ND).sizes()));
    } else {
      const auto [rows_RD, scores_R] = go_inside();
      const auto y_RD = apply_at_experts(in.experts, rows_RD, scores_R, inside);
      const auto at_node = start_to_node(y_RD, inside.recv, inside.send, in.codec).wait();
      // The sum of a token on this node goes home, where those of all nodes are summed.
      const auto sums_MD = combine_rows(at_node, sorted.token_R, sorted.inverse_TK);
      const auto home = dense(start_to_owners(sums_MD, hop.recv, hop.send, in.codec).wait());
      return combine_rows(home, to_nodes.token_R, to_nodes.inverse_TK);
    }
  }

  // Tokens by the nodes of their experts, each once for a node: inverse_TK is [N, n].
  kernels::Sorted sort_by_node(const at::Tensor& experts_NK) const {
    const std::int64_t num_nodes = current_mesh().size(ep_nodes), num_tokens = experts_NK.size(0);
    if (experts_NK.is_meta())
      return spread_evenly(std::llround(static_cast<double>(num_tokens) *
                                        mean_nodes(router_, static_cast<int>(num_nodes))),
                           num_nodes, {num_tokens, num_nodes});
    // A node without an expert of the token is bin n, to which nothing is sent.
    const at::Tensor node_NK = experts_NK.div(experts_of_a_node(), "floor"),
                     none_Nn = at::full({num_tokens, num_nodes}, num_nodes, experts_NK.options());
    return kernels::sort_by_expert(none_Nn.scatter(1, node_NK, node_NK), num_nodes + 1,
                                   {0, num_nodes});
  }

  // The choices that are experts of this node, by expert.
  kernels::Sorted sort_on_node(const at::Tensor& chosen_MK, std::int64_t num_own_tokens) const {
    const std::int64_t count = experts_of_a_node();
    if (chosen_MK.is_meta())
      return spread_evenly(num_own_tokens * router_.top_k, count, chosen_MK.sizes());
    return kernels::sort_by_expert(chosen_MK, router_.num_experts,
                                   {current_mesh().coordinate(ep_nodes) * count, count});
  }

  std::int64_t experts_of_a_node() const {
    return router_.num_experts / current_mesh().size(ep_nodes);
  }

  RouterConfig router_;
};

// All tokens go to all ranks of ep x etp, one row a token; each computes the rows of its own
// experts, and one reduction sums the outputs.
class AllGather final : public RoundTrip {
  PerToken routed(const DispatchInput& in, const std::function<void()>& meanwhile) const override {
    return in.dy_ND ? run(in, meanwhile, *in.dy_ND) : run(in, meanwhile);
  }

  template <class... Gradient>
  static PerToken run(const DispatchInput& in, const std::function<void()>& meanwhile,
                      const Gradient&... dy_ND) {
    const SplitDim rows{.dim = 0, .sizes = in.tokens.rows(*current_mesh().group(kExpertAxes))};
    auto moving = start_all_gather_together<kExpertAxes>(
        rows.sizes, sparse(coded(in.x_ND, in.codec)), sparse(in.route.weights_NK),
        sparse(numbers(in.route)), sparse(coded(dy_ND, in.codec))...);
    meanwhile();
    const auto all = moving.wait();
    const auto y = in.experts.apply_to_tokens(decoded(std::get<0>(all)), std::get<1>(all),
                                              experts_of(std::get<2>(all)));  // T,R,R -> T,P,P
    if constexpr (sizeof...(dy_ND) > 0)
      return dense(at_home<kExpertAxes>(y, decoded(std::get<3>(all)), local(in.x_ND).sizes()));
    else
      return dense(start_reduce_scatter<kExpertAxes>(y, rows, in.codec).wait());  // T,T,T
  }
};

// all_gather where ep x etp are the tp ranks themselves: the routed and the shared experts use one
// gather and one reduction.
class AllGatherOverTp final : public Dispatch {
 public:
  Stream<true> operator()(const DispatchInput& in, const Stream<true>& x_ND) const override {
    return run<true>(in, x_ND);
  }
  Stream<false> operator()(const DispatchInput& in, const Stream<false>& x_ND) const override {
    return run<false>(in, x_ND);
  }

 private:
  static inline const Codec kNoCodec;

  template <bool Sp>
  static Stream<Sp> run(const DispatchInput& in, const Stream<Sp>& x_ND) {
    const SplitDim rows = rows_over_tp(in.tokens);
    // Shared experts need x itself, and so do ranks that have it already: then codes do not travel.
    const Codec &early = Sp && !in.shared ? in.codec : kNoCodec,
                &late = Sp && !in.shared ? kNoCodec : in.codec;
    const auto [rows_x, scores, chosen] = gather<Sp>(in, x_ND, rows.sizes, early);
    const Full x = decoded(rows_x), of_experts = decoded(coded(x, late));
    const Sum y = with_coded_gradient(
        dense(in.experts.apply_to_tokens(sparse(of_experts), sparse(scores), experts_of(chosen))),
        in.codec);
    return start_to_stream<Sp>(in.shared ? y + (*in.shared)(x, in.tokens.gathered_numbers()) : y,
                               rows, early)
        .wait();
  }

  // x, scores and choices of all tokens of the tp ranks.
  template <bool Sp>
  static std::tuple<Coded<Full>, Full, Full> gather(const DispatchInput& in, const Stream<Sp>& x_ND,
                                                    const std::vector<std::int64_t>& rows,
                                                    const Codec& codec) {
    const auto& scores_NK = in.route.weights_NK;
    if constexpr (Sp) {
      return start_all_gather_together<tp>(rows, coded(x_ND, codec), scores_NK, numbers(in.route))
          .wait();
    } else {  // x is everywhere already, and its gradient is what travels
      const auto others = all_gather_together<tp>(rows, scores_NK, numbers(in.route));
      return std::tuple_cat(std::tuple(coded(start_enter<tp>(x_ND).wait(), codec)), others);
    }
  }
};

}  // namespace

std::unique_ptr<const Dispatch> make_dispatch(Dispatcher way, const MeshShape& shape,
                                              const RouterConfig& router) {
  switch (way) {
    case Dispatcher::local: return std::make_unique<Local>();
    case Dispatcher::all_to_all: return std::make_unique<AllToAll>();
    case Dispatcher::all_gather:
      if (shape.ep * shape.etp == shape.tp) return std::make_unique<AllGatherOverTp>();
      return std::make_unique<AllGather>();
    case Dispatcher::two_hops: return std::make_unique<TwoHops>(router);
    case Dispatcher::automatic: break;
  }
  throw Error(ErrorKind::internal, "a dispatcher is made of what resolve() gives");
}

}  // namespace moesh::nn
