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
  const std::int64_t f = r.cos_Pf.size(1), num_kept = x.size(3) - 2 * f;
  const at::Tensor wide = x.to(at::kDouble),
                   turning = wide.narrow(3, r.leading ? 0 : num_kept, 2 * f),
                   kept = wide.narrow(3, r.leading ? 2 * f : 0, num_kept);
  const at::Tensor pairs =
      r.interleaved ? turning.unflatten(3, {f, 2}) : turning.unflatten(3, {2, f}).transpose(3, 4);
  at::Tensor turns = at::complex(r.cos_Pf.to(at::kDouble), r.sin_Pf.to(at::kDouble)).unsqueeze(1);
  if (r.positions_BL.defined())
    turns = turns.index_select(0, r.positions_BL.flatten()).unflatten(0, r.positions_BL.sizes());
  const at::Tensor z = at::view_as_real(at::view_as_complex(pairs.contiguous()) * turns);
  return r.leading ? at::cat({z.select(4, 0), z.select(4, 1), kept}, 3)
                   : at::cat({kept, z.select(4, 0), z.select(4, 1)}, 3);
}

void check_rotation(const at::Tensor& x, std::int64_t turns) {
  const auto dtype = x.scalar_type();
  const double tol = dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-6 : 4e-3;
  for (const auto& [interleaved, leading] :
       {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
    Rotation r = random_rotation(x.size(1), turns, dtype == at::kDouble ? at::kDouble : at::kFloat,
                                 interleaved);
    r.leading = leading;
    const at::Tensor dy = normal(x.sizes(), "dy", dtype);
    const at::Tensor leaf = x.to(at::kDouble).clone().requires_grad_(true);
    const at::Tensor want = formula(r, leaf);
    want.backward(dy.to(at::kDouble));
    const std::string what =
        detail::concat(dtype, " ", x.sizes(), ", ", turns, " turn", interleaved ? ", pairs" : "",
                       leading ? ", the first ones" : "");
    const Poison poison;
    expect_close(rotate_forward(r, x), want, tol, "y, " + what);
    expect_close(rotate_backward(r, dy), leaf.grad(), tol, "dx, " + what);
    // In place or not, the same bits.
    const auto consumed = [](const at::Tensor& t) { return t.clone(); };
    expect_equal(rotate_forward(r, consumed(x), Argument::consumed), rotate_forward(r, x),
                 "y of x that is consumed, " + what);
    expect_equal(rotate_backward(r, consumed(dy), Argument::consumed), rotate_backward(r, dy),
                 "dx of dy that is consumed, " + what);
    const at::Tensor by_heads = dy.transpose(1, 2).contiguous().transpose(1, 2).clone();
    expect_equal(rotate_backward(r, by_heads, Argument::consumed), rotate_backward(r, dy),
                 "dx by heads of dy that is consumed, " + what);
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

// A norm and then the rotation, and the derivatives by autograd.
void check_norm(const at::Tensor& x, Rotation r) {
  constexpr double kEps = 1e-3;
  const bool is_double = x.scalar_type() == at::kDouble;
  const double tol = is_double ? 1e-12 : x.scalar_type() == at::kFloat ? 1e-6 : 4e-3;
  const at::Tensor dy = normal(x.sizes(), "dy", x.scalar_type()),
                   weight = normal({x.size(3)}, "w", is_double ? at::kDouble : at::kFloat) + 1,
                   leaf = x.to(at::kDouble).clone().requires_grad_(true),
                   w = weight.to(at::kDouble).clone().requires_grad_(true);
  const at::Tensor want = formula(r, leaf / (leaf.square().mean(-1, true) + kEps).sqrt() * w);
  want.backward(dy.to(at::kDouble));
  const std::string what = detail::concat("norm, ", x.scalar_type(), " ", x.sizes());
  const Poison poison;
  const NormOutput y = norm_forward(x, weight, kEps, r);
  expect_close(y.y, want, tol, "y, " + what);
  const NormGradients d = norm_backward(x, weight, y.r, dy, r),
                      again = norm_backward(x, weight, y.r, dy, r);
  expect_close(d.x, leaf.grad(), tol, "dx, " + what);
  // Where no kernel does both (CPUs; pairs; other widths), the turned gradient is rounded before
  // the norm's is taken.
  const bool in_one = !x.is_cpu() && !r.interleaved && x.size(3) % 64 == 0;
  const bool rounds = !in_one && x.scalar_type() == at::kBFloat16;
  expect_close(d.weight_D, w.grad(), is_double ? 1e-12 : rounds ? 4e-3 : 2e-6, "dw, " + what);
  expect_equal(d.x, again.x, "dx twice, " + what);
  expect_equal(d.weight_D, again.weight_D, "dw twice, " + what);
}

TEST(Rotation, FollowsANormOfHeads) {
  for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble})
    for (const bool leading : {false, true})
      for (const auto& [heads, width, turns] :
           {std::tuple{3, 64, 32}, {1, 128, 64}, {5, 128, 32}, {2, 256, 32}, {3, 48, 16}}) {
        Rotation r =
            random_rotation(5, turns, dtype == at::kDouble ? at::kDouble : at::kFloat, false);
        r.leading = leading;
        check_norm(normal({2, 5, heads, width}, "x", dtype), r);
        // Rows of a projection of several.
        check_norm(normal({2, 5, heads, 2 * width}, "x", dtype).narrow(3, width, width), r);
        r.positions_BL =
            at::tensor({0, 1, 2, 0, 1, 4, 3, 0, 1, 2}, at::kLong).reshape({2, 5}).to(test_device());
        check_norm(normal({2, 5, heads, width}, "x", dtype), r);
      }
  check_norm(normal({3, 700, 9, 128}, "x", at::kBFloat16),  // more heads than blocks
             random_rotation(700, 64, at::kFloat, false));
  Rotation pairs = random_rotation(5, 32, at::kFloat, true);
  check_norm(normal({2, 5, 3, 64}, "x", at::kBFloat16), pairs);
  const at::Tensor none = normal({2, 0, 3, 64}, "x", at::kBFloat16);
  const Rotation r = random_rotation(0, 32, at::kFloat, false);
  const at::Tensor weight = normal({64}, "w", at::kFloat);
  expect_equal(norm_backward(none, weight, norm_forward(none, weight, 1e-3, r).r, none, r).weight_D,
               at::zeros({64}), "d(weight) of no head");
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
