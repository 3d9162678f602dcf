// What backward leaves for later, and parameters that are gathered once for several backwards.

#include "moesh/spmd/weights_later.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <memory>

#include "moesh/fsdp/fsdp.h"
#include "moesh/spmd/attach.h"
#include "tests/comm/trace.h"
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
                               Init{.kind = Init::Distribution::normal, .scale = 1, .seed = 1});
}

at::Tensor numbers(std::int64_t rows, std::int64_t columns) {
  return at::arange(rows * columns, at::TensorOptions(at::kDouble).device(test_device()))
      .reshape({rows, columns})
      .sin();
}

// The weights of a step have its list, and others have none.
TEST(WeightsLater, IsThatOfTheStep) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const auto w = matrix("w", 2, 2);
  const auto later = [&] { return raw::later_of(local(use(w))); };
  EXPECT_FALSE(later());
  StepState outer;
  EXPECT_FALSE(later());
  outer.leave_weights();
  EXPECT_EQ(later(), outer.weights_later);
  EXPECT_FALSE(raw::later_of(local(use(w, raw::LateGradient::never))));
  EXPECT_FALSE(raw::later_of(local(use(w)) * 2)) << "made of it";
  EXPECT_FALSE(raw::later_of({}));
  {
    const StepState inner;
    EXPECT_FALSE(later());
  }
  EXPECT_EQ(later(), outer.weights_later);
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
            StepState step;
            if (in_halves) step.leave_weights();
            std::vector<WeightHalf> halves;
            for (int i = 0; i < 2; ++i) {
              const auto x = as_leaf(assume<Dense{T, T, T}>(numbers(2, 4) * (i + 1)));
              backward(sum_all(linear(linear(x, use(first)), use(second))));
              EXPECT_TRUE(local(grad(x)).defined());
              halves.push_back(step.take_weights());
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
            EXPECT_NO_THROW(step.finish_weights());
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
        StepState step;
        step.leave_weights();
        const at::Tensor whole = local(use(w));
        raw::run_backward([&] { (whole * (mesh.rank() + 1)).sum().backward(); });
        EXPECT_FALSE(w.stored().value.grad().defined());
        WeightHalf half = step.take_weights();
        EXPECT_EQ(half.size(), 1u);
        half.run();
        const at::Tensor expected = at::full({2, 3}, 1.0 + 2.0, w.stored().value.options());
        ASSERT_TRUE(w.stored().value.grad().defined());
        EXPECT_TRUE(at::equal(w.stored().value.grad(), expected));
        const at::Tensor of_now = local(use(w, raw::LateGradient::never));
        raw::run_backward([&] { (of_now * 2).sum().backward(); });
        EXPECT_TRUE(at::equal(w.stored().value.grad(), expected + 4));
        EXPECT_EQ(step.take_weights().size(), 0u);
      },
      test_options());
}

// A whole backward leaves nothing, also beside another one that ends first.
TEST(WeightsLater, LeavesNothingWhereABackwardIsWhole) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const auto w = matrix("w", 2, 2);
  StepState step;
  {
    const auto without_a_list = step.weights_at_once();
  }
  step.leave_weights();
  const auto backward_once = [&] {
    const at::Tensor of_w = local(use(w));
    raw::run_backward([&] { of_w.sum().backward(); });
    return step.take_weights();
  };
  auto first = std::make_unique<WeightsLater::AtOnce>(step.weights_at_once());
  {
    const auto second = step.weights_at_once();
    EXPECT_EQ(backward_once().size(), 0u);
    first.reset();
    EXPECT_EQ(backward_once().size(), 0u);
  }
  EXPECT_EQ(w.stored().value.grad().sum().item<double>(), 2 * 4);
  WeightHalf half = backward_once();
  EXPECT_EQ(half.size(), 1u);
  half.run();
  EXPECT_EQ(w.stored().value.grad().sum().item<double>(), 3 * 4);
}

// Where nothing leads backward to it, or no weight has a list, there is nothing to put off.
TEST(WeightsLater, HasASinkForWhatTakesAGradient) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  auto trained = matrix("trained", 2, 2), frozen = matrix("frozen", 2, 2);
  raw::freeze(frozen.stored());
  const auto with = [&](bool x_takes, std::vector<bool> weights_take) {
    std::vector<at::Tensor> weights{at::Tensor()};  // none
    for (const bool takes : weights_take) weights.push_back(local(use(takes ? trained : frozen)));
    return !raw::sink_for(at::ones({2}, at::kDouble).requires_grad_(x_takes), weights)->is_empty();
  };
  StepState step;
  EXPECT_FALSE(with(true, {true})) << "nobody has asked";
  step.leave_weights();
  EXPECT_TRUE(with(true, {true, true}));
  EXPECT_FALSE(with(true, {}));
  EXPECT_FALSE(with(false, {true}));
  EXPECT_TRUE(with(true, {true, false})) << "one of them is frozen";
  EXPECT_FALSE(with(true, {false, false}));
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(with(true, {true}));
}

TEST(WeightsLater, ASinkLeavesOutWhatIsNotThere) {
  const at::Tensor a = at::ones({2}, at::kDouble).requires_grad_(true),
                   b = at::ones({2}, at::kDouble).requires_grad_(true),
                   frozen = at::ones({2}, at::kDouble);
  const raw::WeightSink sink({a, at::Tensor(), b, frozen});
  const at::Tensor four = at::full({2}, 4, at::kDouble);
  sink.give({at::full({2}, 3, at::kDouble), four, at::Tensor(), four});
  EXPECT_TRUE(at::equal(a.grad(), at::full({2}, 3, at::kDouble)));
  EXPECT_FALSE(b.grad().defined());
  sink.give({at::Tensor(), at::Tensor(), at::full({2}, 5, at::kDouble), four});
  EXPECT_FALSE(frozen.grad().defined());
  EXPECT_TRUE(at::equal(b.grad(), at::full({2}, 5, at::kDouble)));
}

// Two micro-batches gather a weight once where the step keeps it, and not beyond the step.
TEST(KeepGathered, IsSharedInTheStep) {
  comm::launch(
      2,
      [](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 2});
        const MeshScope scope(mesh);
        auto w = matrix("w", 4, 4);
        const auto num_gathers = [&] {
          const comm::Trace trace;
          for (int i = 0; i < 2; ++i) {
            const auto x = as_leaf(assume<Dense{T, T, T}>(numbers(2, 4)));
            backward(sum_all(linear(x, use(w))));
          }
          const auto all = trace.entries();
          return std::count_if(all.begin(), all.end(),
                               [](const auto& e) { return e.op == comm::Collective::all_gather; });
        };
        keep_gathered({&w.stored()});
        EXPECT_EQ(num_gathers(), 2) << "there is no step";
        {
          StepState step;
          keep_gathered({&w.stored()});
          EXPECT_EQ(num_gathers(), 2) << "it keeps none";
          step.keep_gathers();
          EXPECT_EQ(num_gathers(), 2) << "not this one";
          keep_gathered({&w.stored()});
          EXPECT_EQ(num_gathers(), 1);
          EXPECT_EQ(num_gathers(), 0);
          {
            const StepState other;
            EXPECT_EQ(num_gathers(), 2);
          }
          keep_gathered({&w.stored()});
          EXPECT_EQ(num_gathers(), 0);
        }
        EXPECT_EQ(num_gathers(), 2);
      },
      test_options());
}

}  // namespace
}  // namespace moesh
