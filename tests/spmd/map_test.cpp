#include "moesh/spmd/ops.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/base/error.h"
#include "moesh/spmd/spmd.h"

namespace moesh {
namespace {

using enum Place;

TEST(MapRows, CarriesTheLayoutAndTheGradient) {
  const auto x = as_leaf(assume<Dense{T, T, T}>(at::randn({3, 4}, at::kDouble)));
  const auto y = map_rows([](const at::Tensor& t) { return t.softmax(-1).narrow(1, 0, 2); }, x);
  static_assert(decltype(y)::layout == Dense{T, T, T});
  EXPECT_TRUE(at::equal(local(y).detach(), local(x).detach().softmax(-1).narrow(1, 0, 2)));
  local(y).sum().backward();
  EXPECT_TRUE(local(x).grad().abs().sum().item<double>() > 0);
}

TEST(MapRows, OfSeveralTensorsFollowsTheMixingTable) {
  const auto rows = assume<Dense{T, R, R}>(at::randn({3, 4}, at::kDouble));
  const auto shards = assume<Dense{T, T, R}>(at::randn({3, 4}, at::kDouble));
  const auto product = [](const at::Tensor& a, const at::Tensor& b) { return a * b; };
  static_assert(decltype(map_rows(product, rows, shards))::layout == Dense{T, T, R});
  const auto heads = assume<Dense{T, T, F}>(at::randn({1, 3, 2, 4}, at::kDouble));
  const auto weight = assume<Dense{R, R, R}>(at::randn({4}, at::kDouble));
  static_assert(decltype(map_heads(product, heads, weight))::layout == Dense{T, T, F});
  EXPECT_TRUE(at::equal(local(map_heads(product, heads, weight)), local(heads) * local(weight)));
}

TEST(MapRows, RefusesAFunctionThatMakesOrDropsRows) {
  const auto x = assume<Dense{T, T, T}>(at::randn({3, 4}, at::kDouble));
  const auto drops = [](const at::Tensor& t) { return t.narrow(0, 0, 2); };
  const auto flattens = [](const at::Tensor& t) { return t.sum(); };
  EXPECT_THROW(map_rows(drops, x), Error);
  EXPECT_THROW(map_rows(flattens, x), Error);
  const auto heads = assume<Dense{T, T, F}>(at::randn({1, 3, 2, 4}, at::kDouble));
  EXPECT_THROW(map_heads([](const at::Tensor& t) { return t.narrow(2, 0, 1); }, heads), Error);
  try {
    map_rows(drops, x);
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("map_rows made [2, 4] of [3, 4]"), std::string::npos)
        << e.what();
  }
}

TEST(MapLinear, BackwardIsTheAdjoint) {
  const at::Tensor matrix = at::randn({2, 3}, at::kDouble), v = at::randn({2, 4}, at::kDouble);
  const auto x = as_leaf(assume<Sparse{T, E, P}>(at::randn({3, 4}, at::kDouble)));
  const auto y = map_linear([&](const at::Tensor& t) { return matrix.matmul(t); },
                            [matrix](const at::Tensor& g) { return matrix.t().matmul(g); }, x);
  static_assert(decltype(y)::layout == Sparse{T, E, P});
  local(y).backward(v);
  EXPECT_NEAR((local(y).detach() * v).sum().item<double>(),
              (local(x).detach() * local(x).grad()).sum().item<double>(), 1e-12);
}

}  // namespace
}  // namespace moesh
