#include "moesh/fsdp/recompute.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "moesh/fsdp/fsdp.h"
#include "moesh/spmd/attach.h"

namespace moesh {
namespace {

using enum Place;
using Rows = Tensor<Dense{T, T, T}>;
using Counts = Tensor<Dense{P, P, P}>;

class Recompute : public testing::Test {
 protected:
  std::shared_ptr<comm::Group> world_ = comm::solo_group();
  Mesh mesh_{*world_, {}};
  MeshScope scope_{mesh_};
  Param<Dense{I, I, I}> w_{{.name = "w", .shape = {4, 4}, .dtype = at::kDouble},
                           {.kind = Init::Distribution::normal, .seed = 1}};
  int num_calls_ = 0, num_again_ = 0;

  // A function of x and of a parameter, with an output that is not there and one of integers.
  std::tuple<Rows, Rows, Counts> run(const Rows& x, bool again) {
    ++num_calls_, num_again_ += again;
    const auto y = silu(linear(x, use(w_)));
    const auto signs = map_rows([](const at::Tensor& t) { return t.gt(0).to(at::kLong); }, y);
    return {y, Rows(), sum_all(signs)};
  }
};

TEST_F(Recompute, GivesTheSameBitsAndKeepsTheTypes) {
  const at::Tensor value = at::randn({3, 4}, at::kDouble), v = at::randn({3, 4}, at::kDouble);
  const auto kept = as_leaf(assume<Dense{T, T, T}>(value));
  const auto [y, none, counts] = run(kept, false);
  local(y).backward(v);
  const at::Tensor d_w = w_.stored().value.grad().clone();
  w_.stored().value.mutable_grad().reset();

  num_calls_ = 0;
  const auto leaf = as_leaf(assume<Dense{T, T, T}>(value));
  const auto [again_y, again_none, again_counts] =
      recompute([this](const Rows& x, bool again) { return run(x, again); }, leaf);
  static_assert(std::same_as<decltype(again_y), const Rows>);
  static_assert(std::same_as<decltype(again_counts), const Counts>);
  EXPECT_EQ(num_calls_, 1);
  EXPECT_FALSE(local(again_none).defined());
  EXPECT_TRUE(at::equal(local(counts), local(again_counts)));
  EXPECT_TRUE(at::equal(local(y).detach(), local(again_y).detach()));
  local(again_y).backward(v);
  EXPECT_EQ(num_calls_, 2);
  EXPECT_EQ(num_again_, 1);
  EXPECT_TRUE(at::equal(local(kept).grad(), local(leaf).grad()));
  EXPECT_TRUE(at::equal(w_.stored().value.grad(), d_w));
}

TEST_F(Recompute, ReachesParametersWhereTheInputNeedsNoGradient) {
  const auto x = assume<Dense{T, T, T}>(at::randn({3, 4}, at::kDouble));
  const auto out = recompute([this](const Rows& r, bool again) { return run(r, again); }, x);
  local(std::get<0>(out)).sum().backward();
  EXPECT_TRUE(w_.stored().value.grad().defined());
}

TEST_F(Recompute, RunsOnceWithoutGradients) {
  const at::NoGradGuard no_grad;
  recompute([this](const Rows& r, bool again) { return run(r, again); },
            assume<Dense{T, T, T}>(at::randn({3, 4}, at::kDouble)));
  EXPECT_EQ(num_calls_, 1);
}

TEST_F(Recompute, ALayerThatIsKeptHasTheSameBits) {
  const at::Tensor value = at::randn({3, 4}, at::kDouble);
  const auto x = as_leaf(assume<Dense{T, T, T}>(value));
  const auto kept = as_leaf(assume<Dense{T, T, T}>(value));
  const auto run = [&](const Rows& input, Keep keep) {
    w_.stored().value.mutable_grad().reset();
    const auto y = recompute(
        [this](const Rows& r, bool) {
          return std::tuple<Rows>(
              map_rows([](const at::Tensor& t) { return t.tanh(); }, kept_linear(r, use(w_))));
        },
        input, keep);
    local(std::get<0>(y)).sum().backward();
    return w_.stored().value.grad().clone();
  };
  const at::Tensor d_w = run(x, Keep::nothing);
  EXPECT_TRUE(at::equal(run(kept, Keep::expensive), d_w)) << "the same bits";
  EXPECT_TRUE(at::equal(local(x).grad(), local(kept).grad()));
}

// A rank may have none of the features.
TEST_F(Recompute, ALayerThatIsKeptMayBeEmpty) {
  for (const auto& [in, out] : {std::pair<std::int64_t, std::int64_t>{4, 0}, {0, 4}, {0, 0}}) {
    const at::Tensor w = at::ones({out, in}, at::kDouble).requires_grad_(true);
    const auto x = as_leaf(assume<Dense{T, T, T}>(at::ones({2, 3, in}, at::kDouble)));
    const auto y = recompute(
        [&](const Rows& r, bool) {
          return std::tuple<Rows>(assume<Dense{T, T, T}>(raw::kept_linear(local(r), w, {})));
        },
        x, Keep::expensive);
    EXPECT_EQ(local(std::get<0>(y)).size(2), out);
    local(std::get<0>(y)).sum().backward();
    EXPECT_EQ(local(x).grad().sizes(), local(x).sizes());
    EXPECT_EQ(w.grad().sizes(), w.sizes());
  }
}

TEST_F(Recompute, TakesTheValuesOfTheFirstRun) {
  const auto gradient = [&](Keep keep) {
    const auto x = as_leaf(assume<Dense{T, T, T}>(at::ones({2, 4}, at::kDouble)));
    int num_products = 0;
    const auto y = recompute(
        [&](const Rows& r, bool) {
          const auto f = [&](const at::Tensor& t) {
            if (const auto first = raw::recall("x")) return t * (*first)[0];
            const at::Tensor factor = at::full({}, ++num_products, at::kDouble);
            raw::keep("x", {factor});
            return t * factor;
          };
          return std::tuple<Rows>(map_rows(f, r));
        },
        x, keep);
    local(std::get<0>(y)).sum().backward();
    return local(x).grad()[0][0].item<double>() + 10 * num_products;
  };
  EXPECT_EQ(gradient(Keep::nothing), 2 + 10 * 2);    // computed twice, and the second one counts
  EXPECT_EQ(gradient(Keep::expensive), 1 + 10 * 1);  // once
}

TEST_F(Recompute, WhatIsNotComputedShowsWhereItIsNeeded) {
  const auto x = as_leaf(assume<Dense{T, T, T}>(at::ones({2, 4}, at::kDouble)));
  const auto y = recompute(
      [](const Rows& r, bool) {
        const auto end = [](const at::Tensor& t) {
          if (raw::recall("x")) return t + raw::not_computed(t.sizes(), t.options());
          raw::keep("x", {});
          return t + 1;
        };
        return std::tuple<Rows>(square(map_rows(end, r)));  // the gradient of a square needs it
      },
      x, Keep::expensive);
  local(std::get<0>(y)).sum().backward();
  EXPECT_TRUE(local(x).grad().isnan().all().item<bool>());
}

TEST_F(Recompute, BothRunsMustKeepAndAskForTheSame) {
  const auto gradient = [](const char* first, const char* second) {
    const auto x = as_leaf(assume<Dense{T, T, T}>(at::ones({2, 4}, at::kDouble)));
    const auto y = recompute(
        [&](const Rows& r, bool again) {
          if (again && *second) raw::recall(second);
          raw::keep(first, {local(r)});
          return std::tuple<Rows>(square(r));
        },
        x, Keep::expensive);
    const at::Tensor sum = local(std::get<0>(y)).sum();
    sum.backward();
  };
  EXPECT_NO_THROW(gradient("a", "a"));
  EXPECT_ANY_THROW(gradient("a", "b"));
  EXPECT_ANY_THROW(gradient("a", "")) << "what was kept is asked for";
}

TEST_F(Recompute, WhatComesAfterItIsNotKept) {
  const auto x = as_leaf(assume<Dense{T, T, T}>(at::ones({2, 4}, at::kDouble)));
  const auto y =
      recompute([this](const Rows& r, bool) { return std::tuple<Rows>(kept_linear(r, use(w_))); },
                x, Keep::expensive);
  const auto z = kept_linear(std::get<0>(y), use(w_));
  EXPECT_NO_THROW(backward(sum_all(z)));
  EXPECT_FALSE(raw::recall("a linear layer"));
}

TEST_F(Recompute, KeptResultsServeOneBackward) {
  const auto x = as_leaf(assume<Dense{T, T, T}>(at::ones({2, 4}, at::kDouble)));
  const auto y =
      recompute([this](const Rows& r, bool) { return std::tuple<Rows>(kept_linear(r, use(w_))); },
                x, Keep::expensive);
  const at::Tensor sum = local(std::get<0>(y)).sum();
  sum.backward({}, /*retain_graph=*/true);
  EXPECT_THROW(raw::run_backward([&] { sum.backward(); }), std::exception);
}

}  // namespace
}  // namespace moesh
