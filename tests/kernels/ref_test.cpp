#include "tests/kernels/ref_moe.h"

#include "moesh/base/error.h"
#include "tests/kernels/support.h"

namespace moesh::kernels::ref {
namespace {

// The reference itself, against LibTorch's ops on whole tensors.

TEST(RefRouter, SoftmaxMatchesSortAndGather) {
  const at::Tensor logits = normal({20, 7}, "logits").cpu();
  const at::Tensor p = at::softmax(logits, 1);
  const at::Tensor experts = std::get<1>(at::sort(p, true, 1, true)).narrow(1, 0, 3);
  at::Tensor weights = p.gather(1, experts);
  const Routing plain = route({.score = ScoreFunction::softmax, .top_k = 3}, logits, {});
  expect_equal(plain.experts_TK, experts, "experts");
  expect_close(plain.weights_TK, weights, 1e-14, "weights");
  const Routing normalised = route(
      {.score = ScoreFunction::softmax, .top_k = 3, .normalise = true, .scale = 2.5}, logits, {});
  expect_close(normalised.weights_TK, 2.5 * weights / weights.sum(1, true), 1e-14, "normalised");
}

TEST(RefRouter, SoftmaxOfChosenIsTheNormalisedSoftmax) {
  const at::Tensor logits = normal({20, 7}, "logits").cpu();
  const Routing a = route({.score = ScoreFunction::softmax_of_chosen, .top_k = 3}, logits, {});
  const Routing b =
      route({.score = ScoreFunction::softmax, .top_k = 3, .normalise = true}, logits, {});
  expect_equal(a.experts_TK, b.experts_TK, "experts");
  expect_close(a.weights_TK, b.weights_TK, 1e-14, "weights");
}

TEST(RefRouter, BiasSteersTheChoiceOnly) {
  const at::Tensor logits = at::tensor({0.0, 1.0, 2.0}, at::kDouble).view({1, 3});
  const Routing r = route({.top_k = 1}, logits, at::tensor({5.0, 0.0, 0.0}, at::kDouble));
  EXPECT_EQ(r.experts_TK.item<std::int64_t>(), 0);
  EXPECT_DOUBLE_EQ(r.weights_TK.item<double>(), 0.5);  // sigmoid(0)
}

TEST(RefRouter, GroupsLimitTheChoice) {
  // Group scores (two best): {3 + 0, 2 + 2}: the second group wins although the best expert is in
  // the first.
  const at::Tensor logits = at::tensor({3.0, 0.0, 0.0, 2.0, 2.0, 1.0}, at::kDouble).view({1, 6});
  RouterConfig config{
      .score = ScoreFunction::softmax_of_chosen, .top_k = 2, .num_groups = 2, .top_groups = 1};
  expect_equal(route(config, logits, {}).experts_TK, at::tensor({3, 4}, at::kLong).view({1, 2}),
               "one group");
  config.top_groups = 2;
  expect_equal(route(config, logits, {}).experts_TK, at::tensor({0, 3}, at::kLong).view({1, 2}),
               "both groups");
  config.num_groups = 6;
  EXPECT_THROW(route(config, logits, {}), Error);
}

TEST(RefRouter, TiesGoToTheLowestIndex) {
  const Routing r =
      route({.top_k = 2, .num_groups = 2, .top_groups = 1}, at::zeros({1, 6}, at::kDouble), {});
  expect_equal(r.experts_TK, at::tensor({0, 1}, at::kLong).view({1, 2}), "experts");
}

TEST(RefMoe, IsASumOfWeightedMlps) {
  const at::Tensor x = normal({4, 5}, "x").cpu(), gate = normal({3, 5}, "gate").cpu(),
                   w1 = normal({3, 6, 5}, "w1").cpu(), w3 = normal({3, 6, 5}, "w3").cpu(),
                   w2 = normal({3, 5, 6}, "w2").cpu();
  const at::Tensor s = at::softmax(x.matmul(gate.t()), 1);
  at::Tensor dense = at::zeros_like(x),
             before = at::zeros_like(x);  // K = E: every expert, no choice
  for (int e = 0; e < 3; ++e) {
    const auto mlp = [&](const at::Tensor& rows) {
      return (at::silu(rows.matmul(w1[e].t())) * rows.matmul(w3[e].t())).matmul(w2[e].t());
    };
    dense += s.select(1, e).unsqueeze(1) * mlp(x);
    before += mlp(s.select(1, e).unsqueeze(1) * x);
  }
  const MoeParameters parameters{.gate_ED = gate, .experts = {w1, w3, w2}};
  const RouterConfig router{.score = ScoreFunction::softmax, .top_k = 3};
  expect_close(moe(router, {.scores = ScoreSide::after}, parameters, x), dense, 1e-13, "after");
  expect_close(moe(router, {.scores = ScoreSide::before}, parameters, x), before, 1e-13, "before");
}

}  // namespace
}  // namespace moesh::kernels::ref
