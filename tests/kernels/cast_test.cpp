#include "moesh/kernels/update.h"

#include "moesh/base/error.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

// As LibTorch rounds: to the nearest, and to even halfway.
TEST(Cast, IsLibTorchs) {
  for (const auto from : {at::kFloat, at::kBFloat16, at::kDouble})
    for (const auto to : {at::kFloat, at::kBFloat16, at::kDouble})
      for (const std::int64_t size : {0, 1, 7, 8, 9, 2047, 2048, 2049, 40'003}) {
        at::Tensor x = normal({size}, "x", from, 3);
        if (size > 8)  // the last two lie halfway between two numbers of bfloat16
          x.narrow(0, 0, 6).copy_(
              at::tensor({INFINITY, NAN, 3.3e38F, 1e-42F, 1 + 1.F / 256, 1 + 3.F / 256}));
        const Poison poison;
        const at::Tensor got = cast(x, to), want = x.to(to);
        EXPECT_EQ(got.scalar_type(), to);
        EXPECT_TRUE(at::equal(got.isnan(), want.isnan()));
        expect_equal(got.nan_to_num(0, 1, 2), want.nan_to_num(0, 1, 2),
                     detail::concat(from, " to ", to, ", ", size));
      }
}

TEST(Cast, OfManyIsThatOfEach) {
  std::vector<Cast> casts;
  for (std::int64_t i = 0; i < 200; ++i) {
    const auto from = i % 3 == 2 ? at::kBFloat16 : at::kFloat, to = i % 3 == 2   ? at::kFloat
                                                                    : i % 7 == 0 ? at::kDouble
                                                                                 : at::kBFloat16;
    const at::Tensor x = normal({i * i}, detail::concat("x", i), from, 3);
    casts.push_back({at::empty(x.sizes(), x.options().dtype(to)), x});
  }
  cast_all(casts);
  for (const auto& [to, from] : casts) expect_equal(to, from.to(to.scalar_type()), "one of many");
  cast_all({});
}

TEST(Cast, TakesWhatHasGaps) {
  const at::Tensor x = normal({40, 30}, "x", at::kFloat).t().narrow(0, 3, 20);
  expect_equal(cast(x, at::kBFloat16), x.to(at::kBFloat16), "a view");
  const at::Tensor y = normal({40, 31}, "x", at::kBFloat16).view(-1).narrow(0, 1, 800);
  expect_equal(cast(y, at::kFloat), y.to(at::kFloat), "a view that begins anywhere");
  EXPECT_THROW(cast_into(x, x), Error);
  EXPECT_THROW(cast_into(cast(x, at::kBFloat16), y), Error);
}

}  // namespace
}  // namespace moesh::kernels
