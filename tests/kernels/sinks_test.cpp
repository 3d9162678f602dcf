#include "moesh/kernels/rowwise.h"

#include "moesh/base/error.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

struct SinkCase {
  std::vector<std::int64_t> batch;  // the dimensions before L
  std::int64_t length, heads, width;
};

// A softmax over scores and one sink for each head, written out: y' and its gradient follow from
// the shares of the scores, whatever the values are.
void check(const SinkCase& c, at::ScalarType dtype) {
  auto shape = c.batch, lse_shape = c.batch;
  shape.insert(shape.end(), {c.length, c.heads, c.width});
  lse_shape.insert(lse_shape.end(), {c.heads, c.length});
  const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor y = normal(shape, "y", dtype), dy = normal(shape, "dy", dtype),
                   lse = normal(lse_shape, "lse", wide, 4),
                   sinks = normal({c.heads}, "sinks", wide, 4);
  const at::Tensor s = sinks.to(at::kDouble).clone().requires_grad_(true), l = lse.to(at::kDouble);
  const at::Tensor total = l.exp() + s.exp().unsqueeze(1);
  const at::Tensor want = y.to(at::kDouble) * (l.exp() / total).transpose(-2, -1).unsqueeze(-1);
  want.backward(dy.to(at::kDouble));
  const double tol = dtype == at::kDouble ? 1e-11 : dtype == at::kFloat ? 1e-5 : 4e-3;
  const std::string what = detail::concat(dtype, " ", at::IntArrayRef(shape));
  const Poison poison;
  const at::Tensor out = y.clone();
  const at::Tensor with_sinks = add_sinks_(out, lse, sinks);
  expect_close(out, want, tol, "y', " + what);
  expect_close(with_sinks, total.log(), dtype == at::kDouble ? 1e-12 : 1e-5, "lse', " + what);
  const at::Tensor got = sink_gradient(out, with_sinks, sinks, dy);
  // Its terms have both signs: against what they are, not what is left of them.
  const at::Tensor terms = (want.detach() * dy.to(at::kDouble)).sum(-1).transpose(-2, -1) *
                           (s.detach().exp().unsqueeze(1) / total.detach());
  const at::Tensor size = terms.movedim(-2, 0).flatten(1).norm(2, 1) + 1e-30;
  ASSERT_EQ(got.sizes(), sinks.sizes()) << what;
  ASSERT_EQ(got.scalar_type(), wide) << what;
  if (got.numel() == 0) return;
  EXPECT_LT(((got.to(at::kDouble) - s.grad()) / size).abs().max().item<double>(), 3 * tol) << what;
}

TEST(Sinks, AreOneMoreScoreWithoutAValue) {
  for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
    check({{2}, 37, 8, 64}, dtype);
    check({{}, 130, 6, 64}, dtype);  // documents, one behind the other
    check({{3}, 20, 3, 192}, dtype);
    check({{2}, 5, 4, 8}, dtype);
    check({{2}, 5, 4, 12}, dtype);  // not a multiple of 8
    check({{1}, 300, 2, 256}, dtype);
    check({{2}, 0, 4, 64}, dtype);
    check({{2}, 4, 0, 64}, dtype);
  }
}

// Where a sink takes everything, or nothing.
TEST(Sinks, OfAnySizeLeaveNothingInfinite) {
  const at::Tensor y = normal({1, 4, 3, 64}, "y", at::kBFloat16), dy = y.clone(),
                   lse = normal({1, 3, 4}, "lse", at::kFloat),
                   sinks = normal({3}, "sinks", at::kFloat);
  sinks[0] = 500, sinks[1] = -500, sinks[2] = 0;
  const at::Tensor out = y.clone();
  const at::Tensor with_sinks = add_sinks_(out, lse, sinks);
  const at::Tensor gradient = sink_gradient(out, with_sinks, sinks, dy);
  EXPECT_TRUE(at::isfinite(with_sinks).all().item<bool>());
  EXPECT_TRUE(at::isfinite(gradient).all().item<bool>());
  EXPECT_EQ(out.select(2, 0).abs().max().item<float>(), 0);
  EXPECT_TRUE(at::equal(out.select(2, 1), y.select(2, 1)));
  EXPECT_EQ(gradient[1].item<float>(), 0);
}

TEST(Sinks, RefuseWhatDoesNotFit) {
  const at::Tensor y = normal({2, 5, 4, 8}, "y", at::kBFloat16),
                   lse = normal({2, 4, 5}, "lse", at::kFloat),
                   sinks = normal({4}, "sinks", at::kFloat);
  EXPECT_THROW(add_sinks_(y, lse, normal({3}, "sinks", at::kFloat)), Error);
  EXPECT_THROW(add_sinks_(y, lse.transpose(1, 2), sinks), Error);
  EXPECT_THROW(add_sinks_(y, lse, sinks.to(at::kBFloat16)), Error);
  EXPECT_THROW(sink_gradient(y, lse, sinks, y.narrow(1, 0, 4)), Error);
}

}  // namespace
}  // namespace moesh::kernels
