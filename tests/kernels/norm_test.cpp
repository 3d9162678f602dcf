#include "moesh/kernels/rowwise.h"

#include "moesh/base/error.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

constexpr double kEps = 1e-3;

// In float64, and its derivative by autograd: y, dx, d(weight).
std::vector<at::Tensor> formula(const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& dy) {
  const at::Tensor v = x.to(at::kDouble).clone().requires_grad_(true);
  at::Tensor w;
  at::Tensor y = v / (v.square().mean(-1, true) + kEps).sqrt();
  if (weight.defined()) w = weight.to(at::kDouble).clone().requires_grad_(true), y = y * w;
  y.backward(dy.to(at::kDouble));
  return {y, v.grad(), w.defined() ? w.grad() : at::Tensor()};
}

void check_norm(const at::Tensor& x, bool weighted) {
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor dy = normal(x.sizes(), "dy", x.scalar_type());
  const at::Tensor weight = weighted ? normal({x.size(-1)}, "weight", wide) + 1 : at::Tensor();
  const auto want = formula(x, weight, dy);
  const Poison poison;
  const NormOutput y = norm_forward(x, weight, kEps);
  const NormGradients d = norm_backward(x, weight, y.r, dy);
  const std::string what = detail::concat(x.scalar_type(), " ", x.sizes(), weighted ? ", w" : "");
  // Rounded once: half of a unit in the last place of bfloat16, 2^-8.
  const double tol = x.scalar_type() == at::kDouble  ? 1e-12
                     : x.scalar_type() == at::kFloat ? 1e-6
                                                     : 4e-3;
  EXPECT_EQ(y.y.scalar_type(), x.scalar_type());
  EXPECT_EQ(y.r.scalar_type(), wide);
  expect_close(y.y, want[0], tol, "y, " + what);
  expect_close(d.x, want[1], tol, "dx, " + what);
  EXPECT_EQ(d.weight_D.defined(), weighted) << what;
  if (weighted)
    expect_close(d.weight_D, want[2], wide == at::kDouble ? 1e-12 : 2e-6, "dw, " + what);
}

TEST(NormKernel, IsTheFormulaAndItsDerivative) {
  // Widths around what one to eight warps have, and what own kernels do not take.
  for (const std::int64_t width :
       {8, 64, 136, 512, 1024, 1032, 2048, 2880, 4096, 7168, 8192, 8200, 13})
    for (const std::int64_t rows : {1, 7, 65})
      check_norm(normal({rows, width}, "x", at::kBFloat16), rows != 7);
  check_norm(normal({5000, 128}, "x", at::kBFloat16), true);  // more rows than blocks
  check_norm(normal({2, 3, 5, 24}, "x", at::kBFloat16), true);
  check_norm(normal({2, 3, 24}, "x", at::kFloat), true);
  check_norm(normal({2, 3, 24}, "x", at::kDouble), true);
  check_norm(normal({2, 3, 24}, "x", at::kDouble), false);
}

TEST(NormKernel, AddsAGradientThatComesBesideIt) {
  for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble})
    for (const auto& [rows, width] : {std::pair{300, 64}, {65, 1032}, {7, 8192}, {5, 13}}) {
      const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
      const at::Tensor x = normal({rows, width}, "x", dtype),
                       dy = normal({rows, width}, "dy", dtype),
                       beside = normal({rows, width}, "beside", dtype),
                       weight = normal({width}, "w", wide) + 1;
      const auto want = formula(x, weight, dy);
      const Poison poison;
      const NormOutput y = norm_forward(x, weight, kEps);
      const NormGradients d = norm_backward(x, weight, y.r, dy, {}, beside);
      const double tol = dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-6 : 4e-3;
      expect_close(d.x, want[1] + beside.to(want[1].options()), tol, "dx");
      expect_equal(d.weight_D, norm_backward(x, weight, y.r, dy).weight_D, "d(weight)");
    }
}

TEST(NormKernel, TakesRowsWithGaps) {
  const at::Tensor wide = normal({2, 9, 80}, "x", at::kBFloat16);
  check_norm(wide.narrow(2, 0, 64), true);
  check_norm(wide.narrow(2, 8, 64), true);
  check_norm(wide.narrow(2, 3, 64), true);  // not at a multiple of 16 bytes
  check_norm(wide.transpose(0, 1).narrow(2, 0, 72), true);
}

TEST(NormKernel, OfNoRowHasAZeroGradientOfItsWeight) {
  const at::Tensor x = normal({0, 16}, "x", at::kBFloat16), w = normal({16}, "w", at::kFloat);
  const Poison poison;
  const NormOutput y = norm_forward(x, w, kEps);
  EXPECT_EQ(y.y.numel(), 0);
  expect_equal(norm_backward(x, w, y.r, x).weight_D, at::zeros({16}), "d(weight)");
}

TEST(NormKernel, GivesTheSameBitsTwice) {
  const at::Tensor x = normal({3001, 264}, "x", at::kBFloat16), w = normal({264}, "w", at::kFloat),
                   dy = normal({3001, 264}, "dy", at::kBFloat16);
  const NormOutput y = norm_forward(x, w, kEps);
  const NormGradients d = norm_backward(x, w, y.r, dy), again = norm_backward(x, w, y.r, dy);
  expect_equal(d.x, again.x, "dx");
  expect_equal(d.weight_D, again.weight_D, "d(weight)");
}

TEST(NormKernel, RefusesWhatDoesNotFit) {
  const at::Tensor x = normal({3, 8}, "x", at::kBFloat16), w = normal({8}, "w", at::kFloat);
  EXPECT_THROW(norm_forward(x, normal({7}, "w", at::kFloat), kEps), Error);
  EXPECT_THROW(norm_forward(x, w.to(at::kBFloat16), kEps), Error);
  const NormOutput y = norm_forward(x, w, kEps);
  EXPECT_THROW(norm_backward(x, w, y.r, x.to(at::kFloat)), Error);
  EXPECT_THROW(norm_backward(x, w, y.r.narrow(0, 0, 2), x), Error);
  EXPECT_THROW(norm_backward(x, w, y.r, x, {}, x.narrow(0, 0, 2)), Error);
}

}  // namespace
}  // namespace moesh::kernels
