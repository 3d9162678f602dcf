#include "moesh/nn/router.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/kernels/routing.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/tensor.h"
#include "moesh/spmd/transitions.h"

namespace moesh::nn {

at::Tensor gate_logits(const at::Tensor& x_TD, const at::Tensor& gate_ED) {
  return raw::differentiable({x_TD, gate_ED}, [&]() -> raw::Differentiable {
    return {{kernels::gate_forward(x_TD, gate_ED)},
            {x_TD, gate_ED},
            [sum = raw::sum_for(x_TD)](const auto& saved, const auto& dy) {
              auto d = kernels::gate_backward(saved[0], saved[1], dy[0], sum.defined());
              if (d.rows_TP.defined())
                sum->add_product(d.rows_TP, d.weight_PD);
              else if (sum)
                sum->add(std::exchange(d.x_TD, {}));
              return raw::Tensors{d.x_TD, d.gate_ED};
            }};
  })[0];
}

namespace {

using enum Place;

// The indices of the k largest of each token.
PerToken best(const PerToken& scores_NE, std::int64_t k) {
  return map_rows([k](const at::Tensor& s) { return kernels::top_k(s, k).experts_TK; }, scores_NE);
}

// Only experts of the best groups stay: the others get -inf. g groups, m experts of each
PerToken limit_to_groups(const PerToken& choice_NE, const RouterConfig& c) {
  const PerToken choice_Ngm = unflatten(choice_NE, 1, {c.num_groups, c.num_experts / c.num_groups});
  const PerToken best_two_Ng =
      map_rows([](const at::Tensor& x) { return std::get<0>(x.topk(2, -1)).sum(-1); }, choice_Ngm);
  const PerToken kept_Ng = one_hot(best(best_two_Ng, c.top_groups), c.num_groups);
  const PerToken limited_Ngm = map_rows(
      [](const at::Tensor& x, const at::Tensor& kept) {
        return x.masked_fill(kept.logical_not().unsqueeze(-1), -INFINITY);
      },
      choice_Ngm, kept_Ng);
  return flatten(limited_Ngm, 1, 2);
}

// Round robin over the experts by global token: every expert gets the same number, whatever the
// mesh.
at::Tensor balanced_choice(const Tokens& tokens, const RouterConfig& c, at::Device device) {
  const at::Tensor ids = tokens.global_ids(device).unsqueeze(1);
  return (ids * c.top_k + at::arange(c.top_k, ids.options())).remainder(c.num_experts);
}

// x of the tokens that count, 0 of the others.
PerToken of_valid(const Route& route, const PerToken& x) {
  return local(route.valid_N1).defined() ? x * route.valid_N1 : x;
}

// int64 [E]: rows of each expert, of the tokens that count.
TokenSum count_valid(const PerToken& experts_NK, const PerToken& valid_N1,
                     std::int64_t num_experts) {
  return declare<Dense{P, P, P}>(
      [&](const at::Tensor& experts, const at::Tensor& valid) {
        return kernels::count_choices(experts, valid, num_experts);
      },
      experts_NK, valid_N1);
}

at::Tensor weigh(const kernels::Weighing& how, const at::Tensor& logits_NE,
                 const at::Tensor& experts_NK) {
  return raw::differentiable({logits_NE}, [&]() -> raw::Differentiable {
    return {{kernels::weigh_forward(how, logits_NE, experts_NK)},
            {logits_NE, experts_NK},
            [how](const raw::Tensors& saved, const raw::Tensors& dy) {
              return raw::Tensors{kernels::weigh_backward(how, saved[0], saved[1], dy[0])};
            }};
  })[0];
}

// Whether balance is over the softmax.
bool has_softmax(const RouterConfig& c) {
  return c.balance_softmax || c.scoring != Scoring::sigmoid;
}

// The choice as the probe wants it.
PerToken probed(const PerToken& experts_NK, const PerToken& scores_NE, const Tokens& tokens,
                const RouteOptions& options, bool for_balance) {
  if (!options.probe) return experts_NK;
  return map_rows(
      [&](const at::Tensor& scores, const at::Tensor& chosen) {
        return options.probe->on_choice({.layer = options.layer,
                                         .micro_batch = options.micro_batch,
                                         .pass = options.pass,
                                         .tokens = tokens,
                                         .scores_NE = scores,
                                         .experts_NK = chosen,
                                         .for_balance = for_balance});
      },
      scores_NE, experts_NK);
}

// What E / K of the tokens of a step makes of one, by how many tokens the counts [.., E] are of.
at::Tensor weight_of_counts(const at::Tensor& counts, const RouterConfig& c,
                            const at::Tensor& num_step_tokens) {
  const at::Tensor tokens = (counts.sum(-1, true) / static_cast<double>(c.top_k)).clamp_min(1);
  return (static_cast<double>(c.num_experts) / static_cast<double>(c.top_k) /
          num_step_tokens.to(at::kDouble))
             .to(counts.scalar_type()) /
         tokens;
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

Router::Router(const RouterConfig& config, const std::string& name, std::int64_t dim,
               const ModuleOptions& o)
    : config_(config) {
  config.validate();
  const auto experts = config.num_experts;
  gate_ = Uncut(o.wide_spec(name + ".weight", {experts, dim}), o.init);
  if (config.gate_bias) gate_bias_.emplace(o.wide_spec(name + ".bias", {experts}), o.init);
  expert_bias_E_ = at::zeros({experts}, at::TensorOptions(o.device).dtype(wide_dtype(o.dtype)));
  pending_counts_E_ =
      once<kTokenAxes>(constant(at::zeros({experts}, expert_bias_E_.options().dtype(at::kLong))));
}

PerToken Router::choose_experts(const PerToken& logits_NE, const Tokens& tokens,
                                const RouteOptions& options) const {
  const at::NoGradGuard no_grad;
  const bool on_logits = config_.choose_on_logits || config_.scoring == Scoring::softmax_chosen;
  const auto scores_of = [&](const at::Tensor& l) {
    return config_.scoring == Scoring::sigmoid ? l.sigmoid() : l.softmax(-1);
  };
  PerToken choice = detach(logits_NE);
  if (!on_logits) choice = map_rows(scores_of, choice);
  choice = choice + constant(expert_bias_E_);
  PerToken experts;
  try {
    if (config_.num_groups > 1) choice = limit_to_groups(choice, config_);
    experts = best(choice, config_.top_k);
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::data) throw;
    // A NaN: which layer's, only the router knows.
    throw Error(ErrorKind::diverged, detail::concat("router '", gate_.name(), "': ", e.what()));
  }
  if (config_.forced_balance)
    experts = map_rows(
        [&](const at::Tensor& e) { return balanced_choice(tokens, config_, e.device()); }, experts);
  return probed(experts, choice, tokens, options, /*for_balance=*/false);
}

Route Router::choose(const PerToken& x_ND, const Tokens& tokens, const RouteOptions& options) {
  Route route;
  route.valid_N1 = tokens.valid_N1();
  auto logits = gate_logits(x_ND, use(gate_));
  if (gate_bias_) logits = logits + use(*gate_bias_);
  route.logits_NE = logits;

  route.experts_NK = choose_experts(logits, tokens, options);
  const kernels::Weighing how{.scoring = config_.scoring,
                              .normalize = config_.normalize,
                              .epsilon = config_.epsilon,
                              .scale = config_.scale};
  route.weights_NK = map_rows(
      [&](const at::Tensor& l, const at::Tensor& experts) { return weigh(how, l, experts); },
      logits, route.experts_NK);

  route.counts_E = count_valid(route.experts_NK, route.valid_N1, config_.num_experts);
  if (options.pass == Pass::training)
    at::Tensor(local(pending_counts_E_)).add_(local(route.counts_E));
  return route;
}

void Router::update_bias(double coeff, const at::Tensor& skip) {
  const at::Tensor total_E = whole(all_reduce<kTokenAxes>(pending_counts_E_));
  const at::Tensor sign =
      (total_E.sum() - config_.num_experts * total_E).sign().to(expert_bias_E_.scalar_type());
  const at::Tensor step = sign * coeff, moved = expert_bias_E_ + (step - step.mean());
  expert_bias_E_.copy_(skip.defined() ? at::where(skip.ne(0), expert_bias_E_, moved) : moved);
  clear_counts();
}

void Router::clear_counts() { at::Tensor(local(pending_counts_E_)).zero_(); }

void Router::set_pending_counts(const Tensor<Dense{R, R, R}>& total_E) {
  at::Tensor(local(pending_counts_E_)).copy_(local(once<kTokenAxes>(total_E)));
}

PerToken probabilities(const Route& route, const RouterConfig& config) {
  return map_rows(
      [&](const at::Tensor& l) {
        if (has_softmax(config)) return l.softmax(-1);
        const at::Tensor s = l.sigmoid();
        return s / (s.sum(-1, true) + 1e-20);
      },
      route.logits_NE);
}

TokenSum balance_loss(const Route& route, const RouterConfig& config, const Tokens& tokens,
                      const at::Tensor& num_step_tokens, BalanceOver over,
                      const RouteOptions& options) {
  // Logits have the order of the scores, whatever these are.
  const PerToken scores_NE = detach(route.logits_NE);
  const PerToken experts_NK =
      probed(best(scores_NE, config.top_k), scores_NE, tokens, options, /*for_balance=*/true);
  const auto dtype = local(scores_NE).scalar_type();
  const auto weight = [&](const at::Tensor& counts) {
    return weight_of_counts(counts, config, num_step_tokens);
  };
  if (over == BalanceOver::micro_batch) {
    const auto counts_E = cast(
        all_reduce<kTokenAxes>(count_valid(experts_NK, route.valid_N1, config.num_experts)), dtype);
    return sum_all(sum<Over::tokens>(of_valid(route, probabilities(route, config))) * counts_E *
                   constant(weight(whole(counts_E))));
  }
  const kernels::BalanceOf balance{.softmax = has_softmax(config),
                                   .experts_TK = local(experts_NK),
                                   .valid_T1 = local(route.valid_N1),
                                   .members_BT = tokens.members(local(scores_NE).device(), dtype),
                                   .equal_runs = tokens.has_equal_runs()};
  at::Tensor sums_2BE;  // without autograd
  const auto sums_of = [&](const at::Tensor& logits) {
    return raw::differentiable({logits}, [&]() -> raw::Differentiable {
      sums_2BE = kernels::balance_sums(balance, logits);
      return {{sums_2BE[0].variable_data()},
              {logits},
              [balance](const raw::Tensors& saved, const raw::Tensors& dy) {
                return raw::Tensors{kernels::balance_sums_backward(balance, saved[0], dy[0])};
              }};
    })[0];
  };
  // A dp rank has sequences of its own; cp and tp ranks have other tokens of the same ones.
  const auto of_sequences = [](const auto& f, const PerToken& x) {
    return declare<Dense{T, P, P}>(f, x);
  };
  const auto p_BE = of_sequences(sums_of, route.logits_NE);
  const auto counts_BE = all_reduce<kSequenceAxes>(
      of_sequences([&](const at::Tensor&) { return sums_2BE[1]; }, scores_NE));
  return sum_all(p_BE * counts_BE * map_rows(weight, counts_BE));
}

TokenSum z_loss(const Route& route, const at::Tensor& num_step_tokens) {
  const auto squares =
      map_rows([](const at::Tensor& logits) { return logits.logsumexp(-1, true).square(); },
               route.logits_NE);
  return sum_all(scale(of_valid(route, squares), num_step_tokens.reciprocal()));
}

}  // namespace moesh::nn
