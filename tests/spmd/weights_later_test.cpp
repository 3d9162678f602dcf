// What backward leaves for later, and parameters that are gathered once for several backwards.

#include "moesh/spmd/weights_later.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "moesh/spmd/attach.h"
#include "moesh/spmd/kept_gathers.h"
#include "moesh/spmd/spmd.h"
#include "tests/spmd/device.h"

namespace moesh {
namespace {

using enum Place;

Param<Dense{I, I, I}> matrix(const std::string& name, std::int64_t rows, std::int64_t columns) {
  return Param<Dense{I, I, I}>({.name = name,
                                .shape = {rows, columns},
                                .storage_dim = 0,
                                .dtype = at::kDouble,
                                .device = test_device()},
                               Init{.kind = Init::Kind::normal, .scale = 1, .seed = 1});
}

at::Tensor numbers(std::int64_t rows, std::int64_t columns) {
  return at::arange(rows * columns, at::TensorOptions(at::kDouble).device(test_device()))
      .reshape({rows, columns})
      .sin();
}

TEST(WeightsLater, IsOnWhereTheInnermostSays) {
  EXPECT_FALSE(raw::are_weights_later());
  {
    const WeightsLater on(true);
    EXPECT_TRUE(raw::are_weights_later());
    {
      const WeightsLater off(false);
      EXPECT_FALSE(raw::are_weights_later());
    }
    EXPECT_TRUE(raw::are_weights_later());
    {
      const WeightsNow now;
      EXPECT_FALSE(raw::are_weights_later());
    }
    EXPECT_TRUE(raw::are_weights_later());
  }
  EXPECT_FALSE(raw::are_weights_later());
}

// Inputs at once; each weight when its half runs, in the order in which backward came to them.
TEST(WeightsLater, GivesEachWeightItsGradientAfterwards) {
  for (const MeshShape& shape : {MeshShape{}, MeshShape{.dp_shard = 2}})
    comm::launch(
        shape.num_ranks(),
        [&](comm::Group& world) {
          const Mesh mesh(world, shape);
          const MeshScope scope(mesh);
          const auto gradients = [&](bool in_halves) {
            auto first = matrix("first", 5, 4), second = matrix("second", 3, 5);
            WeightsLater later(in_halves);
            std::vector<WeightHalf> halves;
            for (int i = 0; i < 2; ++i) {
              const auto x = as_leaf(assume<Dense{T, T, T}>(numbers(2, 4) * (i + 1)));
              backward(sum_all(linear(linear(x, use(first)), use(second))));
              EXPECT_TRUE(local(grad(x)).defined());
              halves.push_back(later.take());
            }
            const auto has_gradients = [&] {
              return first.stored().value.grad().defined() &&
                     second.stored().value.grad().defined();
            };
            EXPECT_EQ(has_gradients(), !in_halves);
            for (WeightHalf& half : halves) {
              EXPECT_EQ(half.size() > 0, in_halves);
              half.run();
              EXPECT_EQ(half.size(), 0u) << "it is done once";
            }
            EXPECT_TRUE(has_gradients());
            EXPECT_NO_THROW(later.finish());
            return std::vector{first.stored().value.grad(), second.stored().value.grad()};
          };
          const auto whole = gradients(false), halves = gradients(true);
          for (size_t i = 0; i < whole.size(); ++i)
            EXPECT_TRUE(at::allclose(whole[i], halves[i], 1e-13, 1e-13)) << i;
        },
        test_options());
}

// A weight whose gradient comes with backward itself leaves its sum over the ranks.
TEST(WeightsLater, LeavesTheSumOfWhatHasItsGradientAtOnce) {
  comm::launch(
      2,
      [](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 2});
        const MeshScope scope(mesh);
        auto w = matrix("w", 4, 3);
        WeightsLater later(true);
        const at::Tensor whole = local(use(w));
        raw::run_backward([&] { (whole * (mesh.rank() + 1)).sum().backward(); });
        EXPECT_FALSE(w.stored().value.grad().defined());
        WeightHalf half = later.take();
        EXPECT_EQ(half.size(), 1u);
        half.run();
        const at::Tensor expected = at::full({2, 3}, 1.0 + 2.0, w.stored().value.options());
        ASSERT_TRUE(w.stored().value.grad().defined());
        EXPECT_TRUE(at::equal(w.stored().value.grad(), expected));
        at::Tensor of_now;
        {
          const WeightsNow now;
          of_now = local(use(w));
        }
        raw::run_backward([&] { (of_now * 2).sum().backward(); });
        EXPECT_TRUE(at::equal(w.stored().value.grad(), expected + 4));
        EXPECT_EQ(later.take().size(), 0u);
      },
      test_options());
}

// Where nothing leads backward to it, or a weight takes no gradient, there is nothing to put off.
TEST(WeightsLater, HasASinkForWhatTakesAGradient) {
  const auto with = [](bool x_takes, std::vector<bool> weights_take) {
    std::vector<at::Tensor> weights{at::Tensor()};  // none
    for (const bool takes : weights_take)
      weights.push_back(at::ones({2}, at::kDouble).requires_grad_(takes));
    return !raw::sink_for(at::ones({2}, at::kDouble).requires_grad_(x_takes), weights)->is_empty();
  };
  EXPECT_FALSE(with(true, {true})) << "nobody has asked";
  const WeightsLater later(true);
  EXPECT_TRUE(with(true, {true, true}));
  EXPECT_TRUE(with(true, {}));
  EXPECT_FALSE(with(false, {true}));
  EXPECT_FALSE(with(true, {true, false}));
  EXPECT_FALSE(with(true, {false, true}));
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(with(true, {true}));
}

TEST(WeightsLater, ASinkLeavesOutWhatIsNotThere) {
  const at::Tensor a = at::ones({2}, at::kDouble).requires_grad_(true),
                   b = at::ones({2}, at::kDouble).requires_grad_(true);
  const raw::WeightSink sink({a, at::Tensor(), b});
  sink.give({at::full({2}, 3, at::kDouble), at::full({2}, 4, at::kDouble), at::Tensor()});
  EXPECT_TRUE(at::equal(a.grad(), at::full({2}, 3, at::kDouble)));
  EXPECT_FALSE(b.grad().defined());
  sink.give({at::Tensor(), at::Tensor(), at::full({2}, 5, at::kDouble)});
  EXPECT_TRUE(at::equal(b.grad(), at::full({2}, 5, at::kDouble)));
}

// Two micro-batches gather a weight once while both kinds of scope are there, and not beyond them.
TEST(KeptGathers, AreSharedWhileTheyLive) {
  comm::launch(
      2,
      [](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 2});
        const MeshScope scope(mesh);
        auto w = matrix("w", 4, 4);
        const auto num_gathers = [&](bool takes) {
          const comm::Trace trace;
          for (int i = 0; i < 2; ++i) {
            std::optional<TakeKept> take;
            if (takes) take.emplace();
            const auto x = as_leaf(assume<Dense{T, T, T}>(numbers(2, 4)));
            backward(sum_all(linear(x, use(w))));
          }
          const auto all = trace.entries();
          return std::count_if(all.begin(), all.end(),
                               [](const auto& e) { return e.op == comm::Collective::all_gather; });
        };
        EXPECT_EQ(num_gathers(true), 2) << "nobody keeps them";
        {
          const KeptGathers kept(true);
          EXPECT_EQ(num_gathers(false), 2);
          EXPECT_EQ(num_gathers(true), 1);
          EXPECT_EQ(num_gathers(true), 0);
          EXPECT_EQ(num_gathers(false), 2) << "nobody takes them any more";
          {
            const KeptGathers off(false);
            EXPECT_EQ(num_gathers(true), 2);
          }
          EXPECT_EQ(num_gathers(true), 0);
        }
        EXPECT_EQ(num_gathers(true), 2);
      },
      test_options());
}

}  // namespace
}  // namespace moesh
