#include "moesh/kernels/rowwise.h"

#include "moesh/base/error.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

void check_swiglu(at::IntArrayRef sizes, at::ScalarType dtype) {
  const at::Tensor gate = normal(sizes, "gate", dtype, 4), up = normal(sizes, "up", dtype),
                   dh = normal(sizes, "dh", dtype);
  const auto leaf = [](const at::Tensor& t) {
    return t.to(at::kDouble).clone().requires_grad_(true);
  };
  const at::Tensor g = leaf(gate), u = leaf(up), want = g / (1 + (-g).exp()) * u;
  want.backward(dh.to(at::kDouble));
  const double tol = dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-6 : 4e-3;
  const std::string what = detail::concat(dtype, " ", sizes);
  const Poison poison;
  expect_close(swiglu_forward(gate, up), want, tol, "h, " + what);
  const SwigluGradients d = swiglu_backward(gate, up, dh);
  expect_close(d.gate, g.grad(), tol, "d(gate), " + what);
  expect_close(d.up, u.grad(), tol, "d(up), " + what);
  EXPECT_FALSE(d.h.defined());
  const SwigluGradients with_h = swiglu_backward(gate, up, dh.clone(), true);
  expect_equal(with_h.gate, d.gate, "d(gate) with h, " + what);
  expect_equal(with_h.up, d.up, "d(up) with h, " + what);
  expect_equal(with_h.h, swiglu_forward(gate, up), "h once more, " + what);
}

TEST(Swiglu, IsTheFormulaAndItsDerivative) {
  for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
    check_swiglu({3, 5, 64}, dtype);
    check_swiglu({2, 13}, dtype);  // not a multiple of 8
    check_swiglu({0, 8}, dtype);
    check_swiglu({300, 40}, dtype);
  }
}

TEST(Swiglu, RefusesWhatDoesNotFit) {
  const at::Tensor x = normal({3, 8}, "x", at::kBFloat16);
  EXPECT_THROW(swiglu_forward(x, normal({3, 7}, "y", at::kBFloat16)), Error);
  EXPECT_THROW(swiglu_forward(x, x.to(at::kFloat)), Error);
  EXPECT_THROW(swiglu_backward(x, x, normal({8}, "y", at::kBFloat16)), Error);
}

}  // namespace
}  // namespace moesh::kernels
