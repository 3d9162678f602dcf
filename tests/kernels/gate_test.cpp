#include "moesh/kernels/routing.h"

#include "moesh/base/error.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

void check(std::int64_t T, std::int64_t D, std::int64_t E, at::ScalarType x_dtype,
           at::ScalarType dtype, double tol, double tol_x) {
  const at::Tensor x = normal({T, D}, "x", x_dtype), gate = normal({E, D}, "gate", dtype),
                   d = normal({T, E}, "d", dtype);
  const at::Tensor wide_x = x.to(at::kDouble), wide = gate.to(at::kDouble);
  const Poison poison;
  const at::Tensor logits = gate_forward(x, gate);
  const GateGradients got = gate_backward(x, gate, d);
  const std::string what = detail::concat("T ", T, ", D ", D, ", E ", E);
  const GateGradients product = gate_backward(x, gate, d, /*as_product=*/true);
  expect_close(product.rows_TP.defined() ? product.rows_TP.mm(product.weight_PD) : product.x_TD,
               d.to(at::kDouble).mm(wide), tol_x, "dx as a product, " + what);
  EXPECT_EQ(logits.scalar_type(), dtype);
  EXPECT_EQ(got.x_TD.scalar_type(), x_dtype);
  EXPECT_EQ(got.gate_ED.scalar_type(), dtype);
  expect_close(logits, wide_x.mm(wide.t()), tol, "logits, " + what);
  expect_close(got.x_TD, d.to(at::kDouble).mm(wide), tol_x, "dx, " + what);
  expect_close(got.gate_ED, d.to(at::kDouble).t().mm(wide_x), tol, "d(gate), " + what);
}

TEST(Gate, IsAProductInThePrecisionOfTheGate) {
  for (const std::int64_t T : {0, 1, 5, 130, 300}) {
    for (const std::int64_t E : {1, 4, 30, 64, 128, 200, 256}) {
      check(T, 136, E, at::kBFloat16, at::kFloat, 1e-5, 5e-3);
      check(T, 24, E, at::kDouble, at::kDouble, 1e-10, 1e-10);
    }
  }
  check(33, 40, 7, at::kFloat, at::kFloat, 1e-5, 1e-5);
  check(33, 13, 300, at::kBFloat16, at::kFloat, 1e-5, 5e-3);  // no own kernel takes these
  check(70, 2048, 64, at::kBFloat16, at::kFloat, 1e-5, 5e-3);
}

TEST(Gate, RefusesWhatDoesNotFit) {
  const at::Tensor x = normal({3, 8}, "x", at::kBFloat16), gate = normal({4, 8}, "g", at::kFloat);
  EXPECT_THROW(gate_forward(x, normal({4, 9}, "g", at::kFloat)), Error);
  EXPECT_THROW(gate_forward(x, gate.to(at::kBFloat16)), Error);
  EXPECT_THROW(gate_forward(x.to(at::kDouble), gate), Error);
  EXPECT_THROW(gate_backward(x, gate, normal({3, 5}, "d", at::kFloat)), Error);
}

}  // namespace
}  // namespace moesh::kernels
