// What a router makes of its logits besides the choice, against formulas in float64 and what
// autograd makes of them.

#include "moesh/kernels/routing.h"

#include <array>
#include <vector>

#include "moesh/base/error.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

using Sizes = std::vector<std::array<std::int64_t, 3>>;   // tokens, experts, choices
using Shapes = std::vector<std::array<std::int64_t, 4>>;  // sequences, tokens of each, as above

const Scoring kScorings[] = {Scoring::sigmoid, Scoring::softmax, Scoring::softmax_chosen};

at::Tensor wide_leaf(const at::Tensor& t) {
  return t.to(at::kDouble).detach().requires_grad_(true);
}

at::Tensor grad_by_autograd(const at::Tensor& y, const at::Tensor& dy, const at::Tensor& x) {
  y.backward(dy.to(at::kDouble));
  return x.grad();
}

// K different experts for each token.
at::Tensor drawn_experts(std::int64_t T, std::int64_t E, std::int64_t K) {
  return top_k(normal({T, E}, "choices", at::kFloat), K).experts_TK;
}

// Most of the tokens.
at::Tensor mostly_valid(std::int64_t T) { return normal({T, 1}, "valid", at::kFloat) > -1; }

TEST(Weigh, IsTheFormulaAndItsGradient) {
  for (const Scoring scoring : kScorings)
    for (const bool normalize : {false, true})
      for (const auto& [T, E, K] : Sizes{{1, 1, 1},
                                         {0, 4, 2},
                                         {33, 8, 3},
                                         {130, 32, 8},
                                         {70, 64, 6},
                                         {40, 100, 32},
                                         {40, 256, 8},
                                         {20, 300, 4}})
        for (const auto dtype : {at::kFloat, at::kDouble}) {
          const Weighing how{
              .scoring = scoring, .normalize = normalize, .epsilon = 0.01, .scale = 2.5};
          const at::Tensor logits = normal({T, E}, "logits", dtype, 2),
                           experts = drawn_experts(T, E, K), d = normal({T, K}, "d", dtype),
                           x = wide_leaf(logits);
          at::Tensor w = scoring == Scoring::softmax_chosen ? x.gather(1, experts).softmax(-1)
                         : scoring == Scoring::softmax      ? x.softmax(-1).gather(1, experts)
                                                            : x.sigmoid().gather(1, experts);
          if (normalize) w = w / (w.sum(-1, true) + 0.01);
          w = w * 2.5;
          const Poison poison;
          const double tol = dtype == at::kFloat ? 1e-5 : 1e-12;
          const std::string what = detail::concat("scoring ", static_cast<int>(scoring), " ",
                                                  normalize, ", T ", T, ", E ", E, ", K ", K);
          expect_close(weigh_forward(how, logits, experts), w.detach(), tol, what);
          expect_close(weigh_backward(how, logits, experts, d), grad_by_autograd(w, d, x), tol,
                       "d(logits), " + what);
        }
}

TEST(Weigh, ANanReachesTheWeights) {
  for (const Scoring scoring : kScorings) {
    at::Tensor logits = normal({40, 16}, "logits", at::kFloat);
    const at::Tensor experts = drawn_experts(40, 16, 4);
    logits[7][experts[7][2].item<std::int64_t>()] = std::numeric_limits<float>::quiet_NaN();
    const at::Tensor nan_T = weigh_forward({.scoring = scoring}, logits, experts).isnan().any(1);
    EXPECT_TRUE(nan_T[7].item<bool>());
    EXPECT_EQ(nan_T.sum().item<std::int64_t>(), 1);
  }
}

TEST(Balance, SumsAreTheFormulaAndItsGradient) {
  for (const bool softmax : {false, true})
    for (const bool all : {false, true})
      for (const bool equal_runs : {false, true})
        for (const auto& [B, L, E, K] : Shapes{{1, 1, 1, 1},
                                               {3, 50, 8, 2},
                                               {2, 200, 32, 6},
                                               {4, 64, 64, 6},
                                               {1, 130, 128, 8},
                                               {2, 65, 256, 8}})
          for (const auto dtype : {at::kFloat, at::kDouble}) {
            const std::int64_t T = B * L;
            const at::Tensor logits = normal({T, E}, "logits", dtype, 2), valid = mostly_valid(T),
                             d = normal({B, E}, "d", dtype), x = wide_leaf(logits);
            const at::Tensor sequences =
                at::arange(T, valid.options().dtype(at::kLong)).div(L, "floor");
            BalanceOf balance{
                .softmax = softmax,
                .experts_TK = drawn_experts(T, E, K),
                .valid_T1 = all ? at::Tensor() : valid,
                .members_BT =
                    (at::arange(B, sequences.options()).unsqueeze(1) == sequences).to(dtype),
                .equal_runs = equal_runs};
            const at::Tensor members = balance.members_BT.to(at::kDouble),
                             counted = all ? at::ones_like(valid) : valid;
            at::Tensor p = softmax ? x.softmax(-1) : x.sigmoid();
            if (!softmax) p = p / (p.sum(-1, true) + 1e-20);
            const at::Tensor sums = members.matmul(p * counted),
                             chosen = at::zeros({T, E}, p.options())
                                          .scatter(1, balance.experts_TK, 1.0)
                                          .mul(counted);
            const Poison poison;
            const double tol = dtype == at::kFloat ? 1e-5 : 1e-12;
            const std::string what =
                detail::concat("softmax ", softmax, ", B ", B, ", L ", L, ", E ", E);
            const at::Tensor got = balance_sums(balance, logits);
            expect_close(got[0], sums.detach(), tol, what);
            expect_equal(got[1], members.matmul(chosen).to(dtype), "counts, " + what);
            expect_close(balance_sums_backward(balance, logits, d), grad_by_autograd(sums, d, x),
                         tol, "d(logits), " + what);
          }
}

TEST(CountChoices, CountsThoseOfTokensThatCount) {
  for (const auto& [T, E, K] :
       Sizes{{0, 3, 1}, {1, 1, 1}, {300, 7, 3}, {5000, 64, 6}, {300, 400, 2}})
    for (const bool all : {false, true}) {
      at::Tensor experts = drawn_experts(T, E, K);
      if (T > 10) experts[3][0] = -1, experts[4][0] = E;
      const at::Tensor valid = all ? at::Tensor() : mostly_valid(T),
                       counts = count_choices(experts, valid, E);
      for (std::int64_t e = 0; e < E; ++e) {
        const at::Tensor is_e = experts == e;
        EXPECT_EQ(counts[e].item<std::int64_t>(),
                  (all ? is_e : is_e.logical_and(valid)).sum().item<std::int64_t>())
            << "T " << T << ", expert " << e;
      }
    }
}

TEST(Weigh, RefusesWhatDoesNotFit) {
  const at::Tensor logits = normal({3, 8}, "x", at::kFloat), experts = drawn_experts(3, 8, 2);
  EXPECT_THROW(weigh_forward({}, logits.to(at::kBFloat16), experts), Error);
  EXPECT_THROW(weigh_forward({}, logits, experts.narrow(0, 0, 2)), Error);
  EXPECT_THROW(weigh_backward({}, logits, experts, logits), Error);
  EXPECT_THROW(count_choices(experts, at::ones({2, 1}, experts.options().dtype(at::kBool)), 8),
               Error);
}

TEST(Weigh, ScoresAreGatheredByRow) {
  const at::Tensor x = normal({5}, "x", at::kFloat), index = ints({4, -1, 0, 0, 2, -1});
  const Poison poison;
  const at::Tensor want =
      at::stack({x[4], at::zeros_like(x[0]), x[0], x[0], x[2], at::zeros_like(x[0])});
  expect_equal(gather_rows(x, index), want, "numbers");
}

}  // namespace
}  // namespace moesh::kernels
