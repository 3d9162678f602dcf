#include "moesh/nn/router.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "moesh/base/error.h"
#include "moesh/kernels/topk.h"
#include "moesh/spmd/all_reduce.h"
#include "moesh/spmd/as_term.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/whole.h"

namespace moesh::nn {
namespace {

using enum Place;

constexpr Axes kTokenAxes = dp | cp | tp;
constexpr Dense kPerToken{T, T, T};

at::ScalarType gate_dtype(at::ScalarType run) {
  return run == at::kDouble ? at::kDouble : at::kFloat;
}

ParamSpec gate_spec(const std::string& name, std::vector<std::int64_t> shape, at::ScalarType run,
                    at::Device device) {
  return {.name = name, .shape = std::move(shape), .dtype = gate_dtype(run), .device = device};
}

// Only experts of the best groups stay: the others get -inf.
at::Tensor limit_to_groups(const at::Tensor& choice_NE, const RouterConfig& c) {
  const auto n = choice_NE.size(0), per_group = c.num_experts / c.num_groups;
  const at::Tensor grouped = choice_NE.reshape({n, c.num_groups, per_group});
  const at::Tensor best_two = std::get<0>(grouped.topk(2, -1)).sum(-1);
  const at::Tensor kept = kernels::top_k(best_two, c.top_groups).experts_TK;
  const at::Tensor mask =
      at::zeros({n, c.num_groups}, choice_NE.options().dtype(at::kBool)).scatter_(1, kept, true);
  return grouped.masked_fill(mask.logical_not().unsqueeze(-1), -INFINITY)
      .reshape({n, c.num_experts});
}

// Round robin over the experts by global token: every expert gets the same number, whatever the
// mesh.
at::Tensor balanced_choice(const Tokens& tokens, const RouterConfig& c, at::Device device) {
  const at::Tensor ids = tokens.global_ids(device).unsqueeze(1);
  return (ids * c.top_k + at::arange(c.top_k, ids.options())).remainder(c.num_experts);
}

// The token and choice in which two choices differ, and by how much the choice scores differ there.
void note_flips(const at::Tensor& own_NK, const at::Tensor& replayed_NK,
                const at::Tensor& choice_NE, RoutingRecord& record) {
  const at::Tensor own = std::get<0>(own_NK.sort(-1)), other = std::get<0>(replayed_NK.sort(-1));
  const at::Tensor differs = own.ne(other).any(-1);
  const auto count = differs.sum().item<std::int64_t>();
  if (count == 0) return;
  record.num_flipped += count;
  const at::Tensor worst_own = std::get<0>(choice_NE.gather(1, own_NK).min(-1));
  const at::Tensor worst_other = std::get<0>(choice_NE.gather(1, replayed_NK).min(-1));
  // Between groups of experts the scores of those left out are infinite, and say nothing.
  const at::Tensor margins = (worst_own - worst_other).abs().masked_select(differs);
  const double margin =
      margins.masked_fill(margins.isfinite().logical_not(), 0).max().item<double>();
  double seen = record.largest_margin;
  while (margin > seen && !record.largest_margin.compare_exchange_weak(seen, margin)) {
  }
}

at::Tensor valid_rows(const at::Tensor& x, const at::Tensor& valid_N) {
  return valid_N.defined() ? x.index({valid_N}) : x;
}

// 1 for tokens that count, 0 for the others, as a column of x's dtype.
at::Tensor valid_column(const Route& route, const at::Tensor& like) {
  if (!route.valid_N.defined())
    return at::ones({like.size(0), 1}, like.options().requires_grad(false));
  return route.valid_N.to(like.scalar_type()).unsqueeze(1);
}

}  // namespace

void RouterConfig::validate() const {
  MOESH_CHECK(num_experts >= 1, ErrorKind::config, "router: num_experts is ", num_experts,
              "; it takes 1 or more");
  MOESH_CHECK(top_k >= 1 && top_k <= num_experts, ErrorKind::config, "router: top_k is ", top_k,
              "; with ", num_experts, " experts it takes 1 to ", num_experts);
  MOESH_CHECK(num_groups >= 1 && num_experts % num_groups == 0, ErrorKind::config,
              "router: ", num_experts, " experts do not divide into num_groups = ", num_groups,
              " groups; choose a divisor");
  MOESH_CHECK(top_groups >= 1 && top_groups <= num_groups, ErrorKind::config,
              "router: top_groups is ", top_groups, "; with ", num_groups, " groups it takes 1 to ",
              num_groups);
  if (num_groups > 1) {
    MOESH_CHECK(num_experts / num_groups >= 2, ErrorKind::config,
                "router: num_groups = ", num_groups, " leaves ", num_experts / num_groups,
                " expert in a group, and a group is judged by its best two; use at most ",
                num_experts / 2, " groups");
    MOESH_CHECK(top_k <= top_groups * (num_experts / num_groups), ErrorKind::config,
                "router: top_k = ", top_k, " experts are to come from ", top_groups, " groups of ",
                num_experts / num_groups, "; lower top_k or raise top_groups");
  }
  MOESH_CHECK(epsilon >= 0, ErrorKind::config, "router: epsilon is ", epsilon,
              "; it takes 0 or more");
  MOESH_CHECK(
      scoring == Scoring::sigmoid || !choose_on_logits, ErrorKind::config,
      "router: choose_on_logits goes with sigmoid scores; softmax_chosen always chooses on logits");
}

RoutingRecord::RoutingRecord(std::int64_t num_tokens, std::int64_t top_k)
    : experts_TK(at::full({num_tokens, top_k}, -1, at::kLong)) {}

Router::Router(const RouterConfig& config, const std::string& name, std::int64_t dim,
               at::ScalarType dtype, at::Device device, const Init& init)
    : config_(config) {
  config.validate();
  const auto experts = config.num_experts;
  gate_ = Param<Dense{I, I, I}>(gate_spec(name + ".weight", {experts, dim}, dtype, device), init);
  if (config.gate_bias)
    gate_bias_.emplace(gate_spec(name + ".bias", {experts}, dtype, device), init);
  expert_bias_E_ = at::zeros({experts}, at::TensorOptions(device).dtype(gate_dtype(dtype)));
  pending_counts_E_ = at::zeros({experts}, at::TensorOptions(device).dtype(at::kLong));
}

at::Tensor Router::choose_experts(const at::Tensor& scores_NE, const at::Tensor& logits_NE,
                                  const Tokens& tokens, const RouteOptions& options) const {
  const at::NoGradGuard no_grad;
  const bool on_logits = config_.choose_on_logits || config_.scoring == Scoring::softmax_chosen;
  at::Tensor choice = (on_logits ? logits_NE : scores_NE).detach() + expert_bias_E_;
  if (config_.num_groups > 1) choice = limit_to_groups(choice, config_);
  at::Tensor experts = kernels::top_k(choice, config_.top_k).experts_TK;
  if (config_.forced_balance) experts = balanced_choice(tokens, config_, experts.device());
  if (options.replay) {
    const at::Tensor replayed =
        options.replay->experts_TK.index_select(0, tokens.global_ids() + options.record_start)
            .to(experts.device());
    if (options.pass != Pass::recompute) note_flips(experts, replayed, choice, *options.replay);
    experts = replayed;
  }
  if (options.record)
    options.record->experts_TK.index_copy_(0, tokens.global_ids() + options.record_start,
                                           experts.cpu());
  return experts;
}

Route Router::choose(const PerToken& x_ND, const Tokens& tokens, const RouteOptions& options) {
  Route route;
  route.valid_N = options.valid_N;
  const auto dtype = gate_.stored().spec.dtype;
  auto logits = linear(cast(x_ND, dtype), use(gate_));
  if (gate_bias_) logits = logits + use(*gate_bias_);
  route.logits_NE = logits;

  const at::Tensor& plain = logits.local();
  const at::Tensor scores =
      config_.scoring == Scoring::sigmoid ? plain.sigmoid() : plain.softmax(-1);
  route.probabilities_NE = assume<kPerToken>(
      config_.scoring == Scoring::sigmoid ? scores / (scores.sum(-1, true) + 1e-20) : scores);
  route.experts_NK = choose_experts(scores, plain, tokens, options);

  at::Tensor weights = config_.scoring == Scoring::softmax_chosen
                           ? plain.gather(1, route.experts_NK).softmax(-1)
                           : scores.gather(1, route.experts_NK);
  if (config_.normalize) weights = weights / (weights.sum(-1, true) + config_.epsilon);
  if (config_.scale != 1) weights = weights * config_.scale;
  route.weights_NK = assume<kPerToken>(weights);

  route.counts_E = assume<kPerToken>(at::bincount(
      valid_rows(route.experts_NK, options.valid_N).flatten(), {}, config_.num_experts));
  if (options.pass == Pass::training) pending_counts_E_ += route.counts_E.local();
  return route;
}

void Router::update_bias(double coeff) {
  if (!config_.balance_bias) return clear_counts();
  const auto mine = assume<Dense{P, P, P}>(pending_counts_E_);
  const at::Tensor total_E = whole(all_reduce<kTokenAxes>(mine));
  const at::Tensor sign =
      (total_E.sum() - config_.num_experts * total_E).sign().to(expert_bias_E_.scalar_type());
  const at::Tensor step = sign * coeff;
  expert_bias_E_ = expert_bias_E_ + (step - step.mean());
  clear_counts();
}

void Router::clear_counts() { pending_counts_E_ = at::zeros_like(pending_counts_E_); }

PerToken routing_map(const Route& route, std::int64_t num_experts) {
  const at::Tensor map = at::zeros({route.experts_NK.size(0), num_experts},
                                   route.experts_NK.options().dtype(at::kBool));
  return assume<kPerToken>(map.scatter(1, route.experts_NK, true));
}

TokenSum count_sum(const Route& route) {
  return as_term<dp>(as_term<cp>(as_term<tp>(route.counts_E)));
}

RouterStatistics statistics(const Route& route) {
  const at::NoGradGuard no_grad;
  const at::Tensor counts = whole(all_reduce<kTokenAxes>(count_sum(route))).cpu();
  const at::Tensor load = counts.to(at::kDouble) / std::max<double>(1, counts.sum().item<double>());
  return {.counts_E = counts,
          .entropy = -load.xlogy(load).sum().item<double>(),
          .max_over_mean = load.max().item<double>() * static_cast<double>(counts.numel()),
          .num_idle = counts.eq(0).sum().item<std::int64_t>()};
}

TokenSum switch_loss(const Route& route, const RouterConfig& config, std::int64_t num_step_tokens) {
  const auto dtype = route.logits_NE.local().scalar_type();
  const auto counts_E =
      cast(all_reduce<kTokenAxes>(count_sum(route)), dtype);  // whole, no gradient
  const at::Tensor tokens =
      (whole(counts_E).sum() / static_cast<double>(config.top_k)).clamp_min(1);
  const auto valid = assume<kPerToken>(valid_column(route, local(route.probabilities_NE)));
  const auto sum_E = sum<Over::tokens>(route.probabilities_NE * valid, {0});  // P: left pending
  const auto factor = constant(static_cast<double>(config.num_experts) /
                               static_cast<double>(config.top_k * num_step_tokens) / tokens);
  return sum_all(sum_E * counts_E * factor);
}

TokenSum sequence_loss(const Route& route, const RouterConfig& config, const Tokens& tokens,
                       std::int64_t num_step_tokens) {
  const auto& p = local(route.probabilities_NE);
  const at::Tensor ids = tokens.sequence_ids(p.device());
  // [B, N]: which tokens belong to which sequence; a product with it is a sum over the tokens of
  // each sequence.
  const at::Tensor member =
      (at::arange(tokens.batch(), ids.options()).unsqueeze(1) == ids).to(p.scalar_type()) *
      valid_column(route, p).t();
  const auto of_sequence = [&](const PerToken& x) {
    return declare<Dense{T, P, P}>(
        [&](const at::Tensor& t) { return member.matmul(t.to(p.scalar_type())); }, x);
  };
  const auto counts_BE =
      all_reduce < cp | tp > (of_sequence(routing_map(route, config.num_experts)));
  const at::Tensor lengths =
      (local(counts_BE).sum(1, true) / static_cast<double>(config.top_k)).clamp_min(1);
  const auto factor =
      assume<Dense{T, R, R}>(static_cast<double>(config.num_experts) /
                             static_cast<double>(config.top_k * num_step_tokens) / lengths);
  return sum_all(of_sequence(route.probabilities_NE) * counts_BE * factor);
}

TokenSum z_loss(const Route& route, std::int64_t num_step_tokens) {
  const auto squares = declare<kPerToken>(
      [&](const at::Tensor& logits) {
        return logits.logsumexp(-1, true).square() * valid_column(route, logits);
      },
      route.logits_NE);
  return sum_all(scale(squares, 1.0 / static_cast<double>(num_step_tokens)));
}

}  // namespace moesh::nn
