#include "moesh/nn/router.h"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <functional>

#include "moesh/base/error.h"
#include "moesh/fsdp/fsdp.h"
#include "tests/nn/loss_reference.h"
#include "tests/nn/router_statistics.h"
#include "tests/spmd/device.h"

namespace moesh::nn {
namespace {

using enum Place;

const Init kGateInit{.kind = Init::Distribution::normal, .scale = 0.7, .seed = 4};

template <class Fn>
void alone(Fn f) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  f(mesh);
}

at::Tensor random_rows(std::int64_t n, std::int64_t d) {
  return at::randn({n, d}, at::TensorOptions(at::kDouble).device(test_device()));
}

// A router whose logits are the rows themselves: the gate is the identity.
Router identity_router(const RouterConfig& config) {
  Router router(config, "gate", config.num_experts,
                {.dtype = at::kDouble, .device = test_device(), .init = kGateInit});
  const at::NoGradGuard no_grad;
  auto& gate = router.gate().stored();  // this rank's shard of it
  gate.value.copy_(at::eye(config.num_experts, at::kDouble)
                       .narrow(0, gate.shard.start[0], gate.shard.length[0]));
  return router;
}

Route route_of(Router& router, const at::Tensor& logits, const Mesh& mesh,
               const RouteOptions& options = {}) {
  const Tokens tokens(mesh, 1, logits.size(0), true);
  return router.choose(assume<Dense{T, T, T}>(logits), tokens, options);
}

// The first k of a stable descending sort: LibTorch's own, lowest index first among equals.
at::Tensor sorted_choice(const at::Tensor& scores, std::int64_t k) {
  return std::get<1>(scores.sort(/*stable=*/true, -1, /*descending=*/true)).narrow(1, 0, k);
}

TEST(Router, SigmoidScoresNormalisedAndScaled) {
  alone([](const Mesh& mesh) {
    Router router = identity_router(
        {.num_experts = 8, .top_k = 3, .normalize = true, .epsilon = 1e-20, .scale = 2.5});
    const at::Tensor logits = random_rows(50, 8);
    const Route route = route_of(router, logits, mesh);
    const at::Tensor s = at::sigmoid(logits), expected = sorted_choice(s, 3),
                     w = s.gather(1, expected);
    EXPECT_TRUE(at::equal(local(route.experts_NK), expected));
    EXPECT_TRUE(at::allclose(local(route.weights_NK), w / w.sum(-1, true) * 2.5, 1e-14, 1e-14));
    EXPECT_TRUE(at::allclose(local(probabilities(route, router.config())), s / s.sum(-1, true),
                             1e-14, 1e-14));
  });
}

// MiniMax: only the balance loss takes the softmax.
TEST(Router, SoftmaxForTheBalanceOfSigmoidScores) {
  alone([](const Mesh& mesh) {
    Router router = identity_router({.num_experts = 6, .top_k = 2, .balance_softmax = true});
    const at::Tensor logits = random_rows(40, 6), s = at::sigmoid(logits);
    const Route route = route_of(router, logits, mesh);
    EXPECT_TRUE(at::allclose(local(probabilities(route, router.config())), logits.softmax(-1),
                             1e-14, 1e-14));
    EXPECT_TRUE(
        at::allclose(local(route.weights_NK), s.gather(1, local(route.experts_NK)), 1e-14, 1e-14));
  });
}

TEST(Router, SoftmaxWithAndWithoutNormalisation) {
  alone([](const Mesh& mesh) {
    for (bool normalize : {false, true}) {
      Router router = identity_router({.num_experts = 6,
                                       .top_k = 2,
                                       .scoring = Scoring::softmax,
                                       .normalize = normalize,
                                       .epsilon = 0});
      const at::Tensor logits = random_rows(40, 6), p = at::softmax(logits, -1),
                       expected = sorted_choice(p, 2);
      const Route route = route_of(router, logits, mesh);
      at::Tensor w = p.gather(1, expected);
      if (normalize) w = w / w.sum(-1, true);
      EXPECT_TRUE(at::equal(local(route.experts_NK), expected));
      EXPECT_TRUE(at::allclose(local(route.weights_NK), w, 1e-14, 1e-14));
    }
  });
}

// s / (sum + epsilon) times the scale: epsilon is added, and every scale counts.
TEST(Router, EpsilonAndScaleAreThoseOfTheFormula) {
  alone([](const Mesh& mesh) {
    const at::Tensor logits = random_rows(20, 4), s = at::sigmoid(logits),
                     w = s.gather(1, sorted_choice(s, 2));
    for (const double epsilon : {0.0, 0.5})
      for (const double scale : {0.0, 1.0, 2.5}) {
        Router router = identity_router(
            {.num_experts = 4, .top_k = 2, .normalize = true, .epsilon = epsilon, .scale = scale});
        EXPECT_TRUE(at::allclose(local(route_of(router, logits, mesh).weights_NK),
                                 w / (w.sum(-1, true) + epsilon) * scale, 1e-14, 1e-14))
            << epsilon << " " << scale;
      }
  });
}

// Scores that nearly vanish: shares of them stay shares.
TEST(Router, ProbabilitiesOfTinyScoresAddUpToOneAtMost) {
  alone([](const Mesh& mesh) {
    Router router = identity_router({.num_experts = 4, .top_k = 2});
    for (const double logit : {-30.0, -46.0, -700.0, -1000.0}) {
      const Route route = route_of(
          router, at::full({3, 4}, logit, at::TensorOptions(at::kDouble).device(test_device())),
          mesh);
      const at::Tensor sums = local(probabilities(route, router.config())).sum(-1);
      EXPECT_LE(sums.max().item<double>(), 1 + 1e-12) << logit;
      EXPECT_GE(sums.min().item<double>(), 0) << logit;
    }
  });
}

// A model without a choice: one expert, in a group of its own.
TEST(Router, OneExpertTakesAll) {
  alone([](const Mesh& mesh) {
    Router router = identity_router({.num_experts = 1, .top_k = 1});
    const Route route = route_of(router, random_rows(5, 1), mesh);
    EXPECT_EQ(local(route.counts_E).item<std::int64_t>(), 5);
  });
}

TEST(Router, SoftmaxOverTheChosen) {
  alone([](const Mesh& mesh) {
    Router router =
        identity_router({.num_experts = 6, .top_k = 3, .scoring = Scoring::softmax_chosen});
    const at::Tensor logits = random_rows(40, 6), expected = sorted_choice(logits, 3);
    const Route route = route_of(router, logits, mesh);
    EXPECT_TRUE(at::equal(local(route.experts_NK), expected));
    EXPECT_TRUE(at::allclose(local(route.weights_NK), at::softmax(logits.gather(1, expected), -1),
                             1e-14, 1e-14));
  });
}

TEST(Router, TheLowestIndexWinsTies) {
  alone([](const Mesh& mesh) {
    for (auto scoring : {Scoring::sigmoid, Scoring::softmax, Scoring::softmax_chosen}) {
      Router router = identity_router({.num_experts = 5, .top_k = 3, .scoring = scoring});
      const Route route = route_of(
          router, at::zeros({4, 5}, at::TensorOptions(at::kDouble).device(test_device())), mesh);
      EXPECT_TRUE(at::equal(local(route.experts_NK).cpu(),
                            at::tensor({0, 1, 2}, at::kLong).expand({4, 3})));
    }
  });
}

// Saturated sigmoids are equal in floating point, the logits are not.
TEST(Router, ChoiceOnLogitsSeesThroughSaturation) {
  alone([](const Mesh& mesh) {
    const at::Tensor logits =
        at::tensor({50.0, 60.0, 70.0, 0.0}, at::kDouble).reshape({1, 4}).to(test_device());
    Router on_scores = identity_router({.num_experts = 4, .top_k = 1});
    Router on_logits = identity_router({.num_experts = 4, .top_k = 1, .choose_on_logits = true});
    EXPECT_EQ(local(route_of(on_scores, logits, mesh).experts_NK).item<std::int64_t>(), 0);
    EXPECT_EQ(local(route_of(on_logits, logits, mesh).experts_NK).item<std::int64_t>(), 2);
  });
}

TEST(Router, NodeLimitedRoutingWrittenOut) {
  alone([](const Mesh& mesh) {
    const RouterConfig config{.num_experts = 8, .top_k = 3, .num_groups = 4, .top_groups = 2};
    Router router = identity_router(config);
    router.expert_bias() =
        at::randn({8}, at::TensorOptions(at::kDouble).device(test_device())) * 0.1;
    const at::Tensor logits = random_rows(60, 8);
    const Route route = route_of(router, logits, mesh);
    const at::Tensor s = at::sigmoid(logits).cpu(), c = s + router.expert_bias().cpu();
    for (std::int64_t t = 0; t < 60; ++t) {
      // Groups of two: their score is the sum of both.
      std::vector<std::pair<double, int>> groups;
      for (int g = 0; g < 4; ++g)
        groups.emplace_back(-(c[t][2 * g] + c[t][2 * g + 1]).item<double>(), g);
      std::stable_sort(groups.begin(), groups.end());
      std::vector<std::pair<double, int>> experts;
      for (int e = 0; e < 8; ++e)
        if (e / 2 == groups[0].second || e / 2 == groups[1].second)
          experts.emplace_back(-c[t][e].item<double>(), e);
      std::stable_sort(experts.begin(), experts.end());
      for (int k = 0; k < 3; ++k) {
        EXPECT_EQ(local(route.experts_NK)[t][k].item<std::int64_t>(), experts[k].second);
        // Bias and mask take no part in the weight.
        EXPECT_EQ(local(route.weights_NK)[t][k].item<double>(),
                  s[t][experts[k].second].item<double>());
      }
    }
  });
}

TEST(Router, GateIsFloat32InBfloat16RunsAndTheGateBiasCounts) {
  alone([](const Mesh& mesh) {
    Router router({.num_experts = 4, .top_k = 2, .gate_bias = true}, "gate", 8,
                  {.dtype = at::kBFloat16, .device = test_device(), .init = kGateInit});
    const at::Tensor x = random_rows(9, 8).to(at::kBFloat16);
    const Route route = route_of(router, x, mesh);
    EXPECT_EQ(local(route.logits_NE).scalar_type(), at::kFloat);
    EXPECT_EQ(local(route.weights_NK).scalar_type(), at::kFloat);
    const at::Tensor expected =
        at::linear(x.to(at::kDouble), router.gate().stored().value.to(at::kDouble),
                   router.gate_bias()->stored().value.to(at::kDouble));
    EXPECT_TRUE(at::allclose(local(route.logits_NE).to(at::kDouble), expected, 1e-5, 1e-6));
  });
}

TEST(Router, NanIsAnErrorThatNamesTheToken) {
  alone([](const Mesh& mesh) {
    Router router = identity_router({.num_experts = 4, .top_k = 2});
    at::Tensor logits = random_rows(6, 4);
    logits[3][1] = NAN;
    try {
      route_of(router, logits, mesh);
      FAIL() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::diverged);
      EXPECT_NE(std::string(e.what()).find("3"), std::string::npos) << e.what();
    }
  });
}

// Forced balance is round robin by global token, whatever the mesh.
TEST(Router, ForcedBalanceIsRoundRobin) {
  for (const MeshShape& shape :
       {MeshShape{}, MeshShape{.dp_shard = 2, .tp = 2}, MeshShape{.cp = 3}})
    comm::launch(
        shape.num_ranks(),
        [&](comm::Group& world) {
          const Mesh mesh(world, shape);
          const MeshScope scope(mesh);
          const Tokens tokens(mesh, 2, 5, true);
          Router router = identity_router({.num_experts = 8, .top_k = 3, .forced_balance = true});
          const Route route =
              router.choose(assume<Dense{T, T, T}>(random_rows(tokens.num_local(), 8)), tokens, {});
          for (std::int64_t i = 0; i < tokens.num_local(); ++i)
            for (std::int64_t k = 0; k < 3; ++k)
              EXPECT_EQ(local(route.experts_NK)[i][k].item<std::int64_t>(),
                        (tokens.global(LocalToken{i}).value * 3 + k) % 8);
        },
        test_options());
}

TEST(Router, MapCountsAndStatistics) {
  alone([](const Mesh& mesh) {
    Router router = identity_router({.num_experts = 6, .top_k = 2});
    const Route route = route_of(router, random_rows(31, 6), mesh);
    const at::Tensor map = local(one_hot(route.experts_NK, 6));
    static_assert(decltype(route.counts_E)::layout == Dense{P, P, P});
    EXPECT_TRUE(at::equal(map.sum(1).cpu(), at::full({31}, 2, at::kLong)));
    EXPECT_TRUE(at::equal(map.sum(0), local(route.counts_E)));
    const auto stats = statistics(route);
    EXPECT_EQ(stats.counts_E.sum().item<std::int64_t>(), 62);
    EXPECT_EQ(stats.counts_E.scalar_type(), at::kLong);

    const Route one = route_of(
        router,
        at::tensor({3.0, 2.0, 0.0, 0.0, 0.0, 0.0}, at::kDouble).reshape({1, 6}).to(test_device()),
        mesh);
    const auto narrow = statistics(one);
    EXPECT_EQ(narrow.num_idle, 4);
    EXPECT_DOUBLE_EQ(narrow.max_over_mean, 3);
    EXPECT_NEAR(narrow.entropy, std::log(2.0), 1e-14);
  });
}

TEST(Router, TokensThatDoNotCount) {
  alone([](const Mesh& mesh) {
    Router router = identity_router({.num_experts = 4, .top_k = 2});
    const at::Tensor logits = random_rows(5, 4);
    const at::Tensor valid = at::tensor({1, 0, 1, 1, 0}, at::kLong).to(test_device()).to(at::kBool);
    const Tokens all_tokens(mesh, 1, 5, true, SequenceCut::contiguous, valid.unsqueeze(0)),
        kept_tokens(mesh, 1, 3, true);
    const Route some = router.choose(assume<Dense{T, T, T}>(logits), all_tokens, {});
    const Route kept = route_of(router, logits.index({valid}), mesh);
    EXPECT_TRUE(at::equal(local(some.counts_E), local(kept.counts_E)));
    const auto& config = router.config();
    const auto same = [](const TokenSum& a, const TokenSum& b) {
      EXPECT_NEAR(local(a).item<double>(), local(b).item<double>(), 1e-14);
    };
    const at::Tensor n = at::full({}, 3, at::kDouble);
    for (const auto over : {BalanceOver::sequence, BalanceOver::micro_batch})
      same(balance_loss(some, config, all_tokens, n, over),
           balance_loss(kept, config, kept_tokens, n, over));
    same(z_loss(some, n), z_loss(kept, n));
    const Tokens none(mesh, 1, 5, true, SequenceCut::contiguous,
                      at::zeros_like(valid).unsqueeze(0));
    const auto idle = statistics(router.choose(assume<Dense{T, T, T}>(logits), none, {}));
    EXPECT_EQ(idle.num_idle, 4);
    EXPECT_EQ(idle.entropy, 0);
    EXPECT_EQ(idle.max_over_mean, 0);
  });
}

TEST(AuxiliaryLosses, AreTheirFormulas) {
  alone([](const Mesh& mesh) {
    const RouterConfig config{.num_experts = 5, .top_k = 2, .scoring = Scoring::softmax};
    Router router = identity_router(config);
    const std::int64_t B = 3, L = 4, tokens_total = B * L;
    const at::Tensor logits = random_rows(tokens_total, 5), p = at::softmax(logits, -1);
    const Tokens tokens(mesh, B, L, true);
    const Route route = router.choose(assume<Dense{T, T, T}>(logits), tokens, {});
    const at::Tensor chosen = at::zeros_like(p).scatter(1, sorted_choice(p, 2), 1);
    const at::Tensor num_step = at::full({}, tokens_total, at::kDouble);
    // E * sum_e f_e p_e with f the fraction of routed rows and p the mean probability.
    const auto form = [](const at::Tensor& map, const at::Tensor& prob) {
      return 5 * (map.sum(0) / map.sum() * prob.mean(0)).sum().item<double>();
    };
    const auto loss = [&](BalanceOver over, const at::Tensor& count) {
      return local(balance_loss(route, config, tokens, count, over)).item<double>();
    };
    EXPECT_NEAR(loss(BalanceOver::micro_batch, num_step), form(chosen, p), 1e-14);
    double by_sequence = 0;
    for (std::int64_t b = 0; b < B; ++b)
      by_sequence += form(chosen.narrow(0, b * L, L), p.narrow(0, b * L, L)) / B;
    EXPECT_NEAR(loss(BalanceOver::sequence, num_step), by_sequence, 1e-14);
    EXPECT_NEAR(local(z_loss(route, num_step)).item<double>(),
                at::logsumexp(logits, {-1}).square().mean().item<double>(), 1e-13);
    // A micro-batch counts by its part of the step.
    EXPECT_NEAR(loss(BalanceOver::micro_batch, 4 * num_step), form(chosen, p) / 4, 1e-14);
  });
}

// Equations 17 to 20 of DeepSeek-V3's report, number by number: what is counted are the K_r largest
// of the scores themselves, where the routing has a bias and takes experts of the best groups only.
TEST(AuxiliaryLosses, CountTheBestScoresAsDeepSeekV3Does) {
  alone([](const Mesh& mesh) {
    constexpr std::int64_t N_r = 8, K_r = 3, sequences = 2, length = 9;
    const RouterConfig config{
        .num_experts = N_r, .top_k = K_r, .num_groups = 4, .top_groups = 2, .normalize = true};
    Router router = identity_router(config);
    router.expert_bias().copy_(random_rows(1, N_r)[0]);
    const at::Tensor x = random_rows(sequences * length, N_r), s = at::sigmoid(x).cpu();
    const Tokens tokens(mesh, sequences, length, true);
    const Route route = router.choose(assume<Dense{T, T, T}>(x), tokens, {});
    EXPECT_FALSE(at::equal(std::get<0>(local(route.experts_NK).sort(-1)),
                           std::get<0>(std::get<1>(at::sigmoid(x).topk(K_r, -1)).sort(-1))))
        << "bias and groups change nothing, and the test sees nothing";
    double expected = 0;
    for (std::int64_t b = 0; b < sequences; ++b)
      for (std::int64_t i = 0; i < N_r; ++i) {
        double f_i = 0, P_i = 0;
        for (std::int64_t t = b * length; t < (b + 1) * length; ++t) {
          const double s_it = s[t][i].item<double>();
          const auto num_better = s[t].gt(s_it).sum().item<std::int64_t>();
          f_i += num_better < K_r ? static_cast<double>(N_r) / (K_r * length) : 0;
          P_i += s_it / s[t].sum().item<double>() / length;
        }
        expected += f_i * P_i / sequences;
      }
    const at::Tensor num_step = at::full({}, sequences * length, at::kDouble);
    EXPECT_NEAR(
        local(balance_loss(route, config, tokens, num_step, BalanceOver::sequence)).item<double>(),
        expected, 1e-14);
  });
}

// Values, gradients, counts and the bias over the tokens with a label, on every mesh, against
// formulas on all tokens at once.
TEST(AuxiliaryLosses, AreTheirFormulasOverValidTokensOnEveryMesh) {
  constexpr std::int64_t E = 5, B = 2, L = 9;
  struct Term {
    std::function<TokenSum(const Route&, const RouterConfig&, const Tokens&, const at::Tensor&)>
        loss;
    at::Tensor (*formula)(const losses::Routed&, const at::Tensor&, std::int64_t);
  };
  const Term kTerms[] = {
      {[](const auto& r, const auto& c, const auto& t, const auto& n) {
         return balance_loss(r, c, t, n, BalanceOver::micro_batch);
       },
       losses::balance_over_micro_batch},
      {[](const auto& r, const auto& c, const auto& t, const auto& n) {
         return balance_loss(r, c, t, n, BalanceOver::sequence);
       },
       losses::balance_over_sequences},
      {[](const auto& r, const auto&, const auto&, const auto& n) { return z_loss(r, n); },
       losses::z_loss}};
  for (auto scoring : {Scoring::sigmoid, Scoring::softmax})
    for (const auto& shape :
         {MeshShape{}, MeshShape{.dp_shard = 2, .cp = 2}, MeshShape{.cp = 2, .tp = 2},
          MeshShape{.tp = 4}, MeshShape{.dp_replicate = 2, .cp = 2, .tp = 2}})
      for (const auto mask : losses::kMasks)
        for (bool sp : {true, false}) {
          const RouterConfig config{.num_experts = E, .top_k = 2, .scoring = scoring};
          const std::int64_t sequences = B * shape.dp_replicate * shape.dp_shard;
          const at::Tensor x_SLE = at::randn({sequences, L, E}, at::kDouble),
                           bias = 0.3 * at::randn({E}, at::kDouble),
                           valid = losses::valid_tokens(mask, sequences, L);
          const std::int64_t num_step =
              std::max<std::int64_t>(1, 3 * valid.sum().item<std::int64_t>());  // a third of it
          std::vector<double> values;
          std::vector<at::Tensor> gradients;
          at::Tensor counts;
          for (const Term& term : kTerms) {
            const at::Tensor leaf = x_SLE.flatten(0, 1).clone().requires_grad_(true);
            const at::Tensor s = scoring == Scoring::sigmoid ? leaf.sigmoid() : leaf.softmax(-1);
            const losses::Routed all{leaf, s / s.sum(-1, true),
                                     sorted_choice(s.detach() + bias, 2)};
            const at::Tensor value = term.formula(all, valid, num_step);
            value.backward();
            values.push_back(value.item<double>());
            gradients.push_back(leaf.grad().reshape({sequences, L, E}));
            counts = losses::counts(all, valid);
          }
          const at::Tensor sign = (counts.sum() - E * counts).sign().to(at::kDouble);
          comm::launch(
              shape.num_ranks(),
              [&](comm::Group& world) {
                const Mesh mesh(world, shape);
                const MeshScope scope(mesh);
                const auto mine = [&](const at::Tensor& t) {
                  return t.narrow(0, mesh.coordinate(dp) * B, B).to(test_device());
                };
                const Tokens tokens(mesh, B, L, sp, SequenceCut::balanced, mine(valid));
                const auto own = [&](const at::Tensor& t) {
                  return tokens.own(assume<Dense{T, R, R}>(mine(t)));
                };
                Router router = identity_router(config);
                router.expert_bias().copy_(bias);
                const auto where = [&](size_t i) {
                  return "term " + std::to_string(i) + " on " + shape.describe() +
                         (sp ? "" : " without sequence parallelism") +
                         ", labels: " + losses::to_string(mask);
                };
                for (size_t i = 0; i < 3; ++i) {
                  const auto x = as_leaf(own(x_SLE));
                  const Route route =
                      router.choose(x, tokens, {.pass = i == 0 ? Pass::training : Pass::recompute});
                  const auto loss =
                      kTerms[i].loss(route, config, tokens, at::full({}, num_step, at::kDouble));
                  EXPECT_NEAR(number(all_reduce<kTokenAxes>(loss)), values[i], 1e-12) << where(i);
                  backward(loss);
                  EXPECT_TRUE(at::allclose(local(grad(x)), local(own(gradients[i])), 1e-10, 1e-13))
                      << where(i);
                  EXPECT_TRUE(at::equal(statistics(route).counts_E, counts)) << where(i);
                }
                router.update_bias(0.5);
                EXPECT_TRUE(
                    at::allclose(router.expert_bias().cpu(), bias + 0.5 * (sign - sign.mean())))
                    << where(0);
              },
              test_options());
        }
}

TEST(Balance, MovesTheBiasOncePerStepByTheSign) {
  alone([](const Mesh& mesh) {
    // Worked example: counts [10, 0], coefficient 0.1 -> [-0.1, +0.1].
    Router router = identity_router({.num_experts = 2, .top_k = 1});
    at::Tensor logits = at::zeros({5, 2}, at::TensorOptions(at::kDouble).device(test_device()));
    logits.select(1, 0).fill_(1);
    route_of(router, logits, mesh);  // two accumulation steps of five
    route_of(router, logits, mesh);
    route_of(router, -logits, mesh, {.pass = Pass::evaluation});
    route_of(router, -logits, mesh, {.pass = Pass::recompute});
    router.update_bias(0.1);
    EXPECT_TRUE(at::allclose(router.expert_bias().cpu(), at::tensor({-0.1, 0.1}, at::kDouble)));
    router.update_bias(0.1);  // no tokens since: nothing moves
    EXPECT_TRUE(at::allclose(router.expert_bias().cpu(), at::tensor({-0.1, 0.1}, at::kDouble)));
    route_of(router, logits, mesh);
    router.clear_counts();  // a skipped step
    router.update_bias(0.1);
    EXPECT_TRUE(at::allclose(router.expert_bias().cpu(), at::tensor({-0.1, 0.1}, at::kDouble)));
  });
}

// One expert has too much and three too little: the steps have a mean, which goes, so that biases
// stay where they are as a whole.
TEST(Balance, KeepsTheMeanOfTheBiases) {
  alone([](const Mesh& mesh) {
    Router router = identity_router({.num_experts = 4, .top_k = 1});
    at::Tensor logits = at::zeros({6, 4}, at::TensorOptions(at::kDouble).device(test_device()));
    logits.select(1, 2).fill_(1);
    route_of(router, logits, mesh);
    router.update_bias(0.1);
    EXPECT_TRUE(at::allclose(router.expert_bias().cpu(),
                             at::tensor({0.05, 0.05, -0.15, 0.05}, at::kDouble)));
  });
}

TEST(Balance, CountsAreSummedOverEveryRankThatSawOtherTokens) {
  for (const auto& shape :
       {MeshShape{.dp_shard = 2, .cp = 2, .tp = 2}, MeshShape{.dp_replicate = 2, .tp = 3}})
    comm::launch(
        shape.num_ranks(),
        [&](comm::Group& world) {
          const Mesh mesh(world, shape);
          const MeshScope scope(mesh);
          Router router = identity_router({.num_experts = 8, .top_k = 1});
          // Rank r has r + 1 tokens, all for expert r: no single rank knows the balance.
          const std::int64_t n = world.rank() + 1;
          at::Tensor logits =
              at::zeros({n, 8}, at::TensorOptions(at::kDouble).device(test_device()));
          logits.select(1, world.rank()).fill_(1);
          const Tokens tokens(mesh, 1, 1, true);
          const Route route = router.choose(assume<Dense{T, T, T}>(logits), tokens, {});
          const std::int64_t ranks = world.size(), total = ranks * (ranks + 1) / 2;
          const auto stats = statistics(route);
          router.update_bias(1);
          at::Tensor step = at::empty({8}, at::kDouble);
          for (std::int64_t e = 0; e < 8; ++e) {
            const std::int64_t count = e < ranks ? e + 1 : 0;
            EXPECT_EQ(stats.counts_E[e].item<std::int64_t>(), count);
            step[e] = total > 8 * count ? 1.0 : total < 8 * count ? -1.0 : 0.0;
          }
          EXPECT_TRUE(at::allclose(router.expert_bias().cpu(), step - step.mean()));
        },
        test_options());
}

// Counts that a checkpoint brings are totals, which every rank is given: they count once.
TEST(Balance, CountsThatAreGivenBackMoveTheBiasOnce) {
  for (const auto& shape : {MeshShape{}, MeshShape{.dp_shard = 2, .cp = 2, .tp = 2}})
    comm::launch(
        shape.num_ranks(),
        [&](comm::Group& world) {
          const Mesh mesh(world, shape);
          const MeshScope scope(mesh);
          Router router = identity_router({.num_experts = 2, .top_k = 1});
          const at::Tensor total = at::tensor({10, 0}, at::kLong).to(test_device());
          router.set_pending_counts(constant(total));
          const at::Tensor counts = world.all_reduce(local(router.pending_counts()));
          EXPECT_TRUE(at::equal(counts.cpu(), total.cpu())) << counts;
          router.update_bias(0.1);
          EXPECT_TRUE(
              at::allclose(router.expert_bias().cpu(), at::tensor({-0.1, 0.1}, at::kDouble)));
        },
        test_options());
}

TEST(Probe, SeesTheChoiceAndGivesTheOneThatIsUsed) {
  struct Reversed final : Probe {
    at::Tensor on_choice(const Choice& c) override {
      EXPECT_EQ(c.layer, 3);
      EXPECT_EQ(c.micro_batch, 1);
      EXPECT_EQ(c.pass, Pass::evaluation);
      chosen = c.experts_NK;
      return c.experts_NK.flip(-1);
    }
    at::Tensor chosen;
  };
  alone([](const Mesh& mesh) {
    Router router = identity_router({.num_experts = 6, .top_k = 2});
    const at::Tensor logits = random_rows(20, 6);
    Reversed probe;
    const Route route =
        route_of(router, logits, mesh,
                 {.pass = Pass::evaluation, .probe = &probe, .layer = 3, .micro_batch = 1});
    EXPECT_TRUE(at::equal(probe.chosen, sorted_choice(at::sigmoid(logits), 2)));
    EXPECT_TRUE(at::equal(local(route.experts_NK), probe.chosen.flip(-1)));
    EXPECT_TRUE(at::allclose(local(route.weights_NK),
                             at::sigmoid(logits).gather(1, probe.chosen.flip(-1))));
  });
}

TEST(RouterErrors, NameTheValueAndTheCure) {
  const auto message = [](const RouterConfig& c) {
    try {
      c.validate();
      return std::string("nothing was thrown");
    } catch (const Error& e) {
      return std::string(e.what());
    }
  };
  EXPECT_EQ(message({.num_experts = 4, .top_k = 5}),
            "router: top_k is 5; with 4 experts it takes 1 to 4");
  EXPECT_EQ(message({.num_experts = 6, .top_k = 1, .num_groups = 4, .top_groups = 1}),
            "router: 6 experts do not divide into num_groups = 4 groups; choose a divisor");
  EXPECT_EQ(
      message({.num_experts = 4, .top_k = 1, .num_groups = 4, .top_groups = 1}),
      "router: num_groups = 4 leaves 1 expert in a group, and a group is judged by its best two; use at most 2 groups");
  EXPECT_EQ(
      message({.num_experts = 8, .top_k = 5, .num_groups = 4, .top_groups = 2}),
      "router: top_k = 5 experts are to come from 2 groups of 2; lower top_k or raise top_groups");
  EXPECT_EQ(message({.num_experts = 1, .top_k = 1}), "nothing was thrown");
  alone([](const Mesh&) {
    EXPECT_THROW(identity_router({.num_experts = 4, .top_k = 5}), Error) << "it asks itself";
  });
}

}  // namespace
}  // namespace moesh::nn
