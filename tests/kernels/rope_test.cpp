#include "moesh/kernels/rowwise.h"

#include "moesh/base/error.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

Rotation random_rotation(std::int64_t length, std::int64_t turns, at::ScalarType dtype,
                         bool interleaved) {
  return {normal({length, turns}, "cos", dtype),
          normal({length, turns}, "sin", dtype),
          {},
          interleaved};
}

// In float64, pair by pair as complex numbers.
at::Tensor formula(const Rotation& r, const at::Tensor& x) {
  const std::int64_t f = r.cos_Pf.size(1), kept = x.size(3) - 2 * f;
  const at::Tensor wide = x.to(at::kDouble), turning = wide.narrow(3, kept, 2 * f);
  const at::Tensor pairs =
      r.interleaved ? turning.unflatten(3, {f, 2}) : turning.unflatten(3, {2, f}).transpose(3, 4);
  const at::Tensor z = at::view_as_real(
      at::view_as_complex(pairs.contiguous()) *
      at::complex(r.cos_Pf.to(at::kDouble), r.sin_Pf.to(at::kDouble)).unsqueeze(1));
  return at::cat({wide.narrow(3, 0, kept), z.select(4, 0), z.select(4, 1)}, 3);
}

void check_rotation(const at::Tensor& x, std::int64_t turns) {
  const auto dtype = x.scalar_type();
  const double tol = dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-6 : 4e-3;
  for (const bool interleaved : {false, true}) {
    const Rotation r = random_rotation(
        x.size(1), turns, dtype == at::kDouble ? at::kDouble : at::kFloat, interleaved);
    const at::Tensor dy = normal(x.sizes(), "dy", dtype);
    const at::Tensor leaf = x.to(at::kDouble).clone().requires_grad_(true);
    const at::Tensor want = formula(r, leaf);
    want.backward(dy.to(at::kDouble));
    const std::string what =
        detail::concat(dtype, " ", x.sizes(), ", ", turns, " turn", interleaved ? ", pairs" : "");
    const Poison poison;
    expect_close(rotate_forward(r, x), want, tol, "y, " + what);
    expect_close(rotate_backward(r, dy), leaf.grad(), tol, "dx, " + what);
    // A gradient that lies by heads, as attention may leave it.
    expect_close(rotate_backward(r, dy.transpose(1, 2).contiguous().transpose(1, 2)), leaf.grad(),
                 tol, "dx by heads, " + what);
  }
}

TEST(Rotation, TurnsPairsAndItsAdjointIsTheDerivative) {
  for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
    check_rotation(normal({2, 5, 3, 64}, "x", dtype), 32);
    check_rotation(normal({2, 5, 3, 48}, "x", dtype), 16);  // 16 stay
    check_rotation(normal({1, 7, 2, 12}, "x", dtype), 4);   // not multiples of 8
    check_rotation(normal({2, 5, 1, 16}, "x", dtype), 8);
  }
  check_rotation(normal({3, 40, 16, 192}, "x", at::kBFloat16), 32);
}

// Tokens with lines of their own turn as heads of sequences of one token do, each with its line.
TEST(Rotation, TakesTheLineOfEachToken) {
  for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble})
    for (const bool interleaved : {false, true}) {
      const at::Tensor x = normal({2, 5, 3, 48}, "x", dtype);
      Rotation r =
          random_rotation(9, 16, dtype == at::kDouble ? at::kDouble : at::kFloat, interleaved);
      r.positions_BL =
          at::tensor({0, 1, 8, 0, 1, 3, 0, 0, 1, 2}, at::kLong).reshape({2, 5}).to(x.device());
      const auto of_token = [&](std::int64_t b, std::int64_t l) {
        Rotation one = r;
        const auto line = r.positions_BL[b][l].item<std::int64_t>();
        one.cos_Pf = r.cos_Pf.narrow(0, line, 1), one.sin_Pf = r.sin_Pf.narrow(0, line, 1);
        one.positions_BL = at::Tensor();
        return one;
      };
      const at::Tensor y = rotate_forward(r, x), dx = rotate_backward(r, x);
      for (std::int64_t b = 0; b < 2; ++b)
        for (std::int64_t l = 0; l < 5; ++l) {
          const auto token = [&](const at::Tensor& t) { return t.narrow(0, b, 1).narrow(1, l, 1); };
          EXPECT_TRUE(token(y).equal(rotate_forward(of_token(b, l), token(x)))) << dtype;
          EXPECT_TRUE(token(dx).equal(rotate_backward(of_token(b, l), token(x)))) << dtype;
        }
    }
  Rotation r = random_rotation(9, 8, at::kFloat, false);
  r.positions_BL = at::zeros({2, 4}, at::kLong);
  EXPECT_THROW(rotate_forward(r, normal({2, 5, 1, 16}, "x", at::kBFloat16)), Error);
}

TEST(Rotation, OfNothingIsNothing) {
  for (const std::int64_t length : {0, 5}) {
    const Rotation r = random_rotation(length, 8, at::kFloat, true);
    const at::Tensor x = normal({length == 0 ? 2 : 0, length, 3, 24}, "x", at::kBFloat16);
    EXPECT_EQ(rotate_forward(r, x).sizes(), x.sizes());
    EXPECT_EQ(rotate_backward(r, x).sizes(), x.sizes());
  }
}

TEST(Rotation, TakesHeadsWithGaps) {
  const at::Tensor x = normal({2, 5, 80}, "x", at::kBFloat16);
  check_rotation(x.narrow(2, 64, 16).unsqueeze(2), 8);
  check_rotation(x.narrow(2, 3, 64).unflatten(2, {2, 32}), 16);
}

TEST(Rotation, RefusesWhatDoesNotFit) {
  const Rotation r = random_rotation(5, 8, at::kFloat, false);
  EXPECT_THROW(rotate_forward(r, normal({2, 4, 1, 16}, "x", at::kBFloat16)), Error);
  EXPECT_THROW(rotate_forward(r, normal({2, 5, 1, 14}, "x", at::kBFloat16)), Error);
  EXPECT_THROW(rotate_forward(r, normal({2, 5, 1, 16}, "x", at::kDouble)), Error);
}

}  // namespace
}  // namespace moesh::kernels
