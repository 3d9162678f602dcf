#include "moesh/generate/generate.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "tests/support.h"

namespace moesh::generate {
namespace {

std::map<std::int64_t, double> frequencies(const at::Tensor& logits, const ChooseOptions& options,
                                           std::int64_t count) {
  std::map<std::int64_t, double> found;
  for (std::int64_t i = 0; i < count; ++i)
    found[choose_token(logits, options, i)] += 1 / static_cast<double>(count);
  return found;
}

TEST(Choose, TakesTheFirstOfTheLargestWithoutATemperature) {
  EXPECT_EQ(choose_token(at::tensor({1.0, 5.0, 5.0, -2.0}), {}, 0), 1);
  EXPECT_EQ(choose_token(at::tensor({1.0f, 5.0f, 5.5f}).to(at::kBFloat16), {.seed = 3}, 7), 2);
}

TEST(Choose, DrawsAsOftenAsTheSoftmaxSays) {
  const at::Tensor logits = at::tensor({0.3, -1.0, 2.0, 0.0}, at::kDouble);
  const double temperature = 0.7;
  const at::Tensor wanted = (logits / temperature).softmax(0);
  const auto found = frequencies(logits, {.temperature = temperature, .seed = 1}, 40000);
  for (std::int64_t id = 0; id < 4; ++id)
    EXPECT_NEAR(found.at(id), wanted[id].item<double>(), 0.01) << id;
}

// Probabilities 0.5, 0.25, 0.15, 0.1, not in their order.
TEST(Choose, DrawsFromTheLikeliestThatTogetherHaveTopP) {
  const at::Tensor logits = at::tensor({0.15, 0.5, 0.1, 0.25}, at::kDouble).log();
  const auto options = [](double top_p) {
    return ChooseOptions{.temperature = 1, .top_p = top_p, .seed = 2};
  };
  EXPECT_EQ(frequencies(logits, options(0.4), 2000).size(), 1u);
  const auto two = frequencies(logits, options(0.7), 40000);
  EXPECT_EQ(two.size(), 2u);
  EXPECT_NEAR(two.at(1), 2.0 / 3, 0.01);
  EXPECT_NEAR(two.at(3), 1.0 / 3, 0.01);
  EXPECT_EQ(frequencies(logits, options(0.85), 20000).size(), 3u);
  EXPECT_EQ(frequencies(logits, options(1), 20000).size(), 4u);
}

TEST(Choose, DependsOnSeedAndIndexAlone) {
  const at::Tensor logits = at::zeros({1000});
  const ChooseOptions first{.temperature = 1, .seed = 4}, second{.temperature = 1, .seed = 5};
  EXPECT_EQ(choose_token(logits, first, 9), choose_token(logits, first, 9));
  EXPECT_NE(choose_token(logits, first, 9), choose_token(logits, first, 10));
  EXPECT_NE(choose_token(logits, first, 9), choose_token(logits, second, 9));
}

TEST(Choose, RefusesWhatIsNoProbability) {
  const at::Tensor logits = at::zeros({3});
  expect_parts(error_of([&] { choose_token(logits, {.temperature = -1}, 0); }, ErrorKind::config),
               {"temperature is -1", "0"});
  for (double top_p : {0.0, 1.5})
    expect_parts(error_of([&] { choose_token(logits, {.temperature = 1, .top_p = top_p}, 0); },
                          ErrorKind::config),
                 {"top-p is", "up to 1"});
  for (double bad : {std::numeric_limits<double>::quiet_NaN(), HUGE_VAL})
    expect_parts(
        error_of([&] { choose_token(at::tensor({0.0, bad}), {}, 0); }, ErrorKind::diverged),
        {"not finite"});
}

}  // namespace
}  // namespace moesh::generate
