#include "moesh/nn/norm.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/spmd/device.h"

namespace moesh {
namespace {

using enum Place;

at::Tensor random_leaf(at::IntArrayRef sizes) {
  return at::randn(sizes, at::kDouble).to(test_device()).requires_grad_(true);
}

TEST(RmsNorm, KeepsTheLayoutAndIsTheLibrarysWithItsGradients) {
  at::manual_seed(3);
  const at::Tensor x = random_leaf({3, 5, 8}), w = random_leaf({8}),
                   dy = random_leaf({3, 5, 8}).detach();
  const auto y = nn::rms_norm(assume<Dense{T, T, R}>(x), assume<Dense{R, R, R}>(w), 1e-3);
  static_assert(decltype(y)::layout == Dense{T, T, R});
  const at::Tensor want = at::rms_norm(x, {8}, w, 1e-3);
  EXPECT_TRUE(at::allclose(local(y), want, 1e-10, 1e-12));
  local(y).backward(dy);
  const at::Tensor dx = x.grad().clone(), dw = w.grad().clone();
  x.mutable_grad().zero_(), w.mutable_grad().zero_();
  want.backward(dy);
  EXPECT_TRUE(at::allclose(dx, x.grad(), 1e-10, 1e-12));
  EXPECT_TRUE(at::allclose(dw, w.grad(), 1e-10, 1e-12));
}

TEST(RmsNorm, HasNoWeightWhereNoneIsGiven) {
  const at::Tensor x = random_leaf({3, 8});
  const at::Tensor y = nn::rms_norm(x, {}, 1e-3);
  EXPECT_TRUE(at::allclose(y, at::rms_norm(x, {8}, {}, 1e-3), 1e-10, 1e-12));
  y.backward(at::ones_like(y));
  EXPECT_TRUE(x.grad().defined());
}

}  // namespace
}  // namespace moesh
