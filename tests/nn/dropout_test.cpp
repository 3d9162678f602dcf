#include "moesh/nn/lora.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/nn/dropout_check.h"

namespace moesh::nn {
namespace {

TEST(Dropout, IsThatOfTheFormula) { EXPECT_EQ(dropout_check::complaint(), ""); }

// As many as asked, and without a pattern among neighbours, layers or seeds.
TEST(Dropout, DropsAtRandom) {
  const std::int64_t rows = 2000, features = 512;
  const at::Tensor numbers = at::arange(rows, at::kLong);
  const auto dropped = [&](double rate, std::uint64_t seed, const char* layer) {
    return Dropout(rate, seed, layer)
        .factors(numbers, 0, features, at::kDouble)
        .eq(0)
        .to(at::kDouble);
  };
  const auto correlation = [](const at::Tensor& a, const at::Tensor& b) {
    const at::Tensor x = a - a.mean(), y = b - b.mean();
    return std::abs((x * y).mean().item<double>() / (x.std() * y.std()).item<double>());
  };
  for (const double rate : {0.05, 0.5, 0.9}) {
    const at::Tensor a = dropped(rate, 1, "a");
    EXPECT_NEAR(a.mean().item<double>(), rate, 0.002);
    // Each token, and each feature: five standard deviations.
    const double deviation = std::sqrt(rate * (1 - rate));
    EXPECT_LT((a.mean(1) - rate).abs().max().item<double>(), 5 * deviation / std::sqrt(512));
    EXPECT_LT((a.mean(0) - rate).abs().max().item<double>(), 5 * deviation / std::sqrt(2000));
    EXPECT_LT(correlation(a.narrow(0, 0, rows - 1), a.narrow(0, 1, rows - 1)), 0.005);
    EXPECT_LT(correlation(a.narrow(1, 0, features - 1), a.narrow(1, 1, features - 1)), 0.005);
    EXPECT_LT(correlation(a, dropped(rate, 1, "b")), 0.005);
    EXPECT_LT(correlation(a, dropped(rate, 2, "a")), 0.005);
  }
  // A rank's own features are those of the whole.
  const Dropout dropout(0.5, 1, "a");
  EXPECT_TRUE(dropout.factors(numbers, 100, 50, at::kFloat)
                  .equal(dropout.factors(numbers, 0, 512, at::kFloat).narrow(1, 100, 50)));
}

}  // namespace
}  // namespace moesh::nn
