#include "moesh/kernels/rowwise.h"

#include "moesh/base/error.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

at::Tensor labels(std::int64_t tokens, std::int64_t words) {  // every fourth token's is not here
  at::Tensor out = at::arange(tokens, at::kLong) * 7 % std::max<std::int64_t>(words, 1);
  for (std::int64_t i = 0; i < tokens; i += 4) out[i] = -1;
  return out.to(test_device());
}

void check(std::int64_t tokens, std::int64_t words, at::ScalarType dtype, double scale) {
  const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const double tol = dtype == at::kDouble ? 1e-12 : 2e-5;
  const at::Tensor logits = normal({tokens, words}, "logits", dtype, scale),
                   label = labels(tokens, words);
  const at::Tensor weight =
      at::arange(tokens, at::kLong).remainder(3).ne(1).to(wide).to(test_device());
  const at::Tensor x = logits.to(at::kDouble).clone();
  const std::string what = detail::concat(dtype, " ", x.sizes(), " times ", scale);
  const Poison poison;
  const LogitSums sums = logit_sums(logits, label);
  EXPECT_EQ(sums.sum_N.scalar_type(), wide);
  const at::Tensor here = label.ge(0).to(at::kDouble);
  expect_equal(sums.max_N.to(at::kDouble), x.amax(1), "max, " + what);
  expect_close(sums.sum_N, (x - x.amax(1, true)).exp().sum(1), tol, "sum, " + what);
  const at::Tensor column = label.clamp_min(0).unsqueeze(1);
  expect_equal(sums.picked_N.to(at::kDouble), x.gather(1, column).squeeze(1) * here,
               "picked, " + what);
  // As if there were as much again on another rank.
  const at::Tensor total = (sums.sum_N.log() + sums.max_N + 0.7);
  at::Tensor want = (x - total.to(at::kDouble).unsqueeze(1)).exp();
  want.scatter_add_(1, column, -here.unsqueeze(1));
  want.mul_(weight.to(at::kDouble).unsqueeze(1));
  const at::Tensor d = logit_gradient_(logits, label, total, weight);
  EXPECT_TRUE(d.is_same(logits)) << what;
  expect_close(d, want, dtype == at::kBFloat16 ? 4e-3 : tol, "gradient, " + what);
}

TEST(LogitSums, AndTheirGradientAreTheFormula) {
  for (const double scale : {1.0, 30.0})
    for (const std::int64_t words : {1, 8, 24, 1000, 4096, 4104, 20000})
      check(9, words, at::kBFloat16, scale);
  check(5, 33, at::kFloat, 10);
  check(5, 33, at::kDouble, 10);
}

TEST(LogitSums, OfNoWordAreThoseOfAnEmptySum) {
  const LogitSums sums = logit_sums(normal({3, 0}, "x", at::kBFloat16), labels(3, 0) * 0 - 1);
  expect_equal(sums.max_N, at::full({3}, -INFINITY), "max");
  expect_equal(sums.sum_N, at::zeros({3}), "sum");
  expect_equal(sums.picked_N, at::zeros({3}), "picked");
  EXPECT_EQ(logit_sums(normal({0, 8}, "x", at::kBFloat16), labels(0, 8)).sum_N.numel(), 0);
}

TEST(LogitSums, ShowANaNAndAnInfinity) {
  at::Tensor x = normal({4, 64}, "x", at::kBFloat16);
  x[1][40] = NAN, x[2][63] = INFINITY, x[3][5] = -INFINITY;
  const LogitSums sums = logit_sums(x, labels(4, 64));
  const at::Tensor total = (sums.sum_N.log() + sums.max_N).isfinite().cpu();
  EXPECT_TRUE(total[0].item<bool>());
  EXPECT_FALSE(total[1].item<bool>());
  EXPECT_FALSE(total[2].item<bool>());
  EXPECT_TRUE(total[3].item<bool>());
}

TEST(LogitSums, RefuseWhatDoesNotFit) {
  const at::Tensor x = normal({3, 8}, "x", at::kBFloat16), one = at::ones({3}, test_device());
  EXPECT_THROW(logit_sums(x, labels(2, 8)), Error);
  EXPECT_THROW(logit_sums(x.t(), labels(8, 3)), Error);
  EXPECT_THROW(logit_gradient_(x, labels(3, 8), one.to(at::kDouble), one), Error);
}

}  // namespace
}  // namespace moesh::kernels
