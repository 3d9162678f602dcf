#include "moesh/spmd/ops.h"

#include <gtest/gtest.h>

#include "moesh/base/error.h"
#include "moesh/spmd/spmd.h"
#include "tests/spmd/device.h"
#include "tests/support.h"

namespace moesh {
namespace {

using enum Place;

at::Tensor random(at::IntArrayRef shape) {
  return at::randn(shape, at::TensorOptions(at::kDouble).device(test_device()));
}

// The layout of a result, as a compile-time value.
template <class X>
constexpr auto layout_of = std::remove_cvref_t<X>::layout;

TEST(Ops, AgreeWithLibTorchAndCarryTheirLayout) {
  const auto x = assume<Dense{T, T, R}>(random({3, 4}));
  const auto w = assume<Dense{R, R, F}>(random({5, 4}));
  const auto w2 = assume<Dense{R, R, F}>(random({4, 5}));

  const auto h = linear(x, w);
  static_assert(layout_of<decltype(h)> == Dense{T, T, F});
  EXPECT_TRUE(at::allclose(local(h), local(x).matmul(local(w).t())));
  const auto y = linear(silu(h), w2);
  static_assert(layout_of<decltype(y)> == Dense{T, T, P});
  EXPECT_TRUE(at::allclose(local(y), (local(h) * local(h).sigmoid()).matmul(local(w2).t())));

  static_assert(layout_of<decltype(y + y)> == Dense{T, T, P});
  static_assert(layout_of<decltype(scale(y, 2))> == Dense{T, T, P});
  static_assert(layout_of<decltype(x * x)> == Dense{T, T, R});
  EXPECT_TRUE(at::equal(local(y + y), local(y) + local(y)));
  EXPECT_TRUE(at::equal(local(scale(y, 2)), local(y) * 2));
  EXPECT_TRUE(at::equal(local(square(x)), local(x) * local(x)));
  EXPECT_TRUE(at::allclose(local(sqrt(square(x))), local(x).abs()));
  EXPECT_EQ(local(cast(x, at::kFloat)).scalar_type(), at::kFloat);
}

TEST(Ops, SumsArePartialWhereTheSummedThingVaries) {
  const auto x = assume<Dense{T, T, F}>(random({3, 4}));
  static_assert(layout_of<decltype(sum<Over::tokens>(x))> == Dense{P, P, F});
  static_assert(layout_of<decltype(sum<Over::features>(x))> == Dense{T, T, P});
  static_assert(layout_of<decltype(sum_all(x))> == Dense{P, P, P});
  const auto rows = assume<Sparse{T, E, R}>(random({3, 4}));
  static_assert(layout_of<decltype(sum<Over::experts>(rows))> == Sparse{T, P, R});
  EXPECT_TRUE(at::allclose(local(sum<Over::tokens>(x)), local(x).sum(0)));
  EXPECT_TRUE(at::allclose(local(sum<Over::features>(x)), local(x).sum(1)));
  EXPECT_TRUE(at::allclose(local(sum_all(x)), local(x).sum()));
}

// A tensor of three dimensions may be [B, L, D] or [N, groups, members]: the caller of a sum says
// which.
TEST(Ops, SumsGoOverTheDimensionOfTheirKind) {
  const auto x = random({2, 3, 4});
  const auto rows = flatten(assume<Dense{T, T, F}>(x), 0, 1);
  EXPECT_TRUE(at::allclose(local(sum<Over::tokens>(rows)), x.sum(at::IntArrayRef{0, 1})));
  EXPECT_TRUE(at::allclose(local(sum<Over::features>(rows)), x.sum(2).flatten()));
  const auto groups = flatten(assume<Dense{T, T, R}>(x), 1, 2);
  EXPECT_TRUE(at::allclose(local(sum<Over::tokens>(groups)), x.sum(0).flatten()));
  EXPECT_TRUE(at::allclose(local(sum<Over::experts>(assume<Sparse{R, E, F}>(x))), x.sum(0)));
  EXPECT_TRUE(
      at::allclose(local(sum<Over::tokens>(assume<Dense{T, T, T}>(x[0][0]))), x[0][0].sum()));
  const auto refused = [](const auto& f) { return error_of(f, ErrorKind::config); };
  EXPECT_EQ(refused([&] { sum<Over::tokens>(assume<Dense{T, T, F}>(x)); }),
            "a sum over tokens of a tensor [2, 3, 4]; it takes [N] or [N, D]: flatten(x, first, "
            "last) the dimensions that belong together");
  expect_parts(refused([&] { sum<Over::features>(assume<Dense{T, T, F}>(x)); }),
               {"over features", "[2, 3, 4]", "it takes [N, D]"});
  expect_parts(refused([&] { sum<Over::features>(assume<Dense{T, T, F}>(x[0][0])); }),
               {"over features", "[4]"});
  for (const auto& scalar : {at::ones({}), x.sum()}) {
    expect_parts(refused([&] { sum<Over::tokens>(assume<Dense{T, T, F}>(scalar)); }),
                 {"over tokens", "[]"});
    expect_parts(refused([&] { sum<Over::experts>(assume<Sparse{R, E, F}>(scalar)); }),
                 {"over experts", "it takes [E, ..]"});
  }
}

TEST(Ops, AMapIsTrueAtItsIndices) {
  const auto index = assume<Dense{T, T, T}>(
      at::tensor({2, 0, 1, 1}, at::TensorOptions(at::kLong).device(test_device())).reshape({2, 2}));
  const auto map = one_hot(index, 3);
  static_assert(layout_of<decltype(map)> == Dense{T, T, T});
  EXPECT_TRUE(at::equal(local(map).cpu().to(at::kLong),
                        at::tensor({1, 0, 1, 0, 1, 0}, at::kLong).reshape({2, 3})));
}

TEST(Ops, OtherViewsKeepTheLayout) {
  const auto x = assume<Sparse{T, E, P}>(random({3, 4}));
  static_assert(layout_of<decltype(select(x, 0, 1))> == Sparse{T, E, P});
  static_assert(layout_of<decltype(flatten(x, 0, 1))> == Sparse{T, E, P});
  EXPECT_TRUE(at::equal(local(flatten(x, 0, 1)), local(x).reshape({12})));
  EXPECT_TRUE(at::equal(local(unflatten(flatten(x, 0, 1), 0, {3, 4})), local(x)));
  EXPECT_TRUE(at::equal(local(stack(std::vector{x, x})), at::stack({local(x), local(x)})));
  EXPECT_FALSE(local(detach(as_leaf(x))).requires_grad());
  EXPECT_TRUE(
      at::equal(local(cat(std::vector{narrow(x, 0, 0, 1), narrow(x, 0, 1, 2)}, 0)), local(x)));
  EXPECT_TRUE(at::equal(local(select(x, 0, 1)), local(x)[1]));
}

TEST(Backward, GradientsHaveTheAdjointPlacement) {
  comm::launch(
      2,
      [](comm::Group& world) {
        const Mesh mesh(world, {.tp = 2});
        const MeshScope scope(mesh);
        const auto x = as_leaf(assume<Dense{I, I, R}>(
            at::ones({2}, at::TensorOptions(at::kDouble).device(test_device()))));
        const auto mine = scale(x, world.rank() + 1.0);
        backward(sum_all(keep<tp>(
            mine, {.dim = 0})));  // rank r reads element r: the loss is P on tp, I elsewhere
        const auto g = grad(x);
        static_assert(layout_of<decltype(g)> == Dense{I, I, P});
        EXPECT_TRUE(at::equal(local(all_reduce<tp>(g)).cpu(), at::tensor({1.0, 2.0}, at::kDouble)));
      },
      test_options());
}

// Also where something else takes x besides linear layers, and where only that does.
TEST(Backward, AddsUpTheGradientsOfLinearLayersOfOneInput) {
  const auto options = at::TensorOptions(at::kDouble).device(test_device());
  const auto gradient = [&](int num_layers, bool is_used_besides, bool together) {
    const at::Tensor leaf = at::arange(24, options).reshape({2, 3, 4}).sin().requires_grad_(true);
    const at::Tensor x = together ? raw::for_several(leaf) : leaf;
    at::Tensor loss = is_used_besides ? x.square().sum() : at::zeros({}, options);
    for (int i = 0; i < num_layers; ++i) {
      const at::Tensor w = at::arange(20, options).add(i).cos().reshape({5, 4}),
                       b = at::arange(5, options);
      loss = loss + (i == 1 ? raw::linear(x, w, b) : raw::linear(x, w)).square().sum();
    }
    loss.backward();
    return leaf.grad();
  };
  for (const auto& [num_layers, is_used_besides] :
       {std::pair{0, true}, {1, false}, {1, true}, {3, false}, {3, true}})
    EXPECT_TRUE(at::allclose(gradient(num_layers, is_used_besides, true),
                             gradient(num_layers, is_used_besides, false), 1e-13, 1e-13))
        << num_layers << is_used_besides;
}

TEST(Backward, KeepsNoInputForFrozenWeights) {
  for (const bool is_trained : {false, true}) {
    const at::Tensor leaf = random({2, 3}).requires_grad_(true),
                     w = random({4, 3}).requires_grad_(is_trained);
    at::Tensor x = raw::for_several(leaf * 2);
    const c10::weak_intrusive_ptr<c10::StorageImpl> memory(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(x.storage().unsafeGetStorageImpl()));
    const at::Tensor y = raw::linear(x, w);
    x.reset();
    EXPECT_EQ(memory.expired(), !is_trained);
    y.sum().backward();
    EXPECT_TRUE(at::allclose(leaf.grad(), 2 * w.detach().sum(0).expand({2, 3})));
    EXPECT_EQ(w.grad().defined(), is_trained);
  }
}

// Twice the product, and three times the gradient of its input: which of them is used where shows.
class Scaled final : public LinearProducts {
 public:
  at::Tensor forward(const at::Tensor& x, const at::Tensor& w) const override {
    return 2 * x.matmul(w.t());
  }
  at::Tensor backward(const at::Tensor& rows, const at::Tensor& w) const override {
    return 3 * rows.mm(w);
  }
};

TEST(Linear, OwnProductsGiveTheResultAndTheGradientOfTheInput) {
  const OwnProducts own = c10::make_intrusive<Scaled>();
  const at::Tensor b = random({5}), dy = random({2, 3, 5});
  for (const bool together : {false, true}) {
    const at::Tensor leaf = random({2, 3, 4}).requires_grad_(true),
                     w = random({5, 4}).requires_grad_(true);
    const at::Tensor x = together ? raw::for_several(leaf) : leaf;
    const at::Tensor y = raw::linear(x, w, {}, own), z = raw::linear(x, w, b, own);
    EXPECT_TRUE(at::allclose(y, 2 * leaf.matmul(w.t())));
    EXPECT_TRUE(at::allclose(z, 2 * leaf.matmul(w.t()) + b));
    (y + z).backward(dy);
    EXPECT_TRUE(at::allclose(leaf.grad(), 6 * dy.matmul(w.detach())));
    const at::Tensor rows = dy.flatten(0, 1);
    EXPECT_TRUE(at::allclose(w.grad(), 2 * rows.t().mm(leaf.detach().flatten(0, 1))));
  }
  // A gradient that is a part of a sum may not be rounded.
  const auto x = assume<Dense{T, T, R}>(random({3, 4}));
  EXPECT_NO_THROW(linear(x, assume<Dense{R, R, F}>(random({5, 4})), own));
  EXPECT_THROW(linear(x, assume<Dense{R, R, R}>(random({5, 4})), own), Error);
}

TEST(Backward, ErrorsNameTheCure) {
  const auto x = as_leaf(assume<Dense{P, P, P}>(at::ones({2})));
  EXPECT_THROW(backward(x), Error);
  EXPECT_THROW(grad(x), Error);
}

TEST(Whole, NumbersAreReadAndClipped) {
  const auto norm = assume<Dense{I, I, I}>(at::full({}, 4.0));
  EXPECT_EQ(number(norm), 4);
  const auto factor = [](double n, double max_norm) {
    return clip_factor(assume<Dense{I, I, I}>(at::full({}, n, at::kDouble)), max_norm)
        .item<double>();
  };
  EXPECT_EQ(factor(4, 1), 0.25);
  EXPECT_EQ(factor(4, 5), 1);
  EXPECT_EQ(factor(0, 1), 1);
  EXPECT_TRUE(std::isnan(factor(NAN, 1)));
  EXPECT_THROW(clip_factor(norm, 0), Error);
  EXPECT_THROW(number(assume<Dense{I, I, I}>(at::ones({2}))), Error);
}

}  // namespace
}  // namespace moesh
