#include "moesh/kernels/routing.h"

#include "moesh/base/error.h"
#include "moesh/kernels/table.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

struct Version {
  const char* name;
  at::Tensor (*gather)(const at::Tensor&, const at::Tensor&);
  at::Tensor (*combine)(const at::Tensor&, const at::Tensor&);
};
const Version kVersions[] = {{"public", gather_rows, combine_rows},
                             {"libtorch", aten_kernels().gather_rows, aten_kernels().combine_rows}};

// Every token chooses k different experts.
at::Tensor choices(std::int64_t num_tokens, std::int64_t k, std::int64_t num_experts) {
  return std::get<1>(at::topk(normal({num_tokens, num_experts}, "choices"), k, 1));
}

TEST(GatherRows, CopiesRowsAndZeros) {
  for (const auto& v : kVersions) {
    for (auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
      for (std::int64_t width : {1, 2, 3, 7, 8, 9, 31, 33, 130}) {
        const Poison poison;
        const at::Tensor x = normal({5, width}, "x", dtype);
        const at::Tensor got = v.gather(x, ints({4, -1, 0, 0, 3}));
        expect_equal(got, at::stack({x[4], at::zeros_like(x[0]), x[0], x[0], x[3]}), v.name);
      }
    }
    const at::Tensor numbers = longs({5, 6, 7});
    expect_equal(v.gather(numbers, ints({2, -1, 1})), longs({7, 0, 6}), "integers");
    expect_equal(v.gather(normal({0, 3}, "x"), ints({-1})), at::zeros({1, 3}, at::kDouble),
                 "from nothing");
    EXPECT_EQ(v.gather(normal({4, 3}, "x"), ints({})).sizes(), at::IntArrayRef({0, 3}));
  }
  EXPECT_THROW(gather_rows(normal({3, 2}, "x"), longs({0})), Error);
}

TEST(GatherRows, ChecksIndicesOnTheCpu) {  // a device asserts by itself
  const at::Tensor x = at::zeros({3, 2});
  EXPECT_THROW(gather_rows(x, at::tensor({3}, at::kInt)), Error);
  EXPECT_THROW(gather_rows(x, at::tensor({-2}, at::kInt)), Error);
  EXPECT_THROW(combine_rows(x, at::tensor({3}, at::kInt).view({1, 1})), Error);
}

TEST(CombineRows, OfGatheredTokensIsKTimesTheToken) {
  for (const auto& v : kVersions) {
    for (auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
      for (std::int64_t k : {1, 2, 4}) {
        for (std::int64_t width : {1, 3, 8, 33, 65, 200}) {
          const Poison poison;
          const Sorted s = sort_by_expert(choices(21, k, 6), 6);
          const at::Tensor x = normal({21, width}, "x", dtype);
          expect_equal(v.combine(v.gather(x, s.token_R), s.inverse_TK), x * k,
                       v.name);  // powers of two: exact
        }
      }
    }
  }
}

TEST(CombineRows, LeavesOutWhatIsElsewhere) {
  for (const auto& v : kVersions) {
    const Poison poison;
    const at::Tensor rows = normal({3, 5}, "rows", at::kFloat);
    const at::Tensor got = v.combine(rows, ints({0, -1, -1, -1, 2, 1, -1, 0}).view({4, 2}));
    expect_equal(got, at::stack({rows[0], at::zeros_like(rows[0]), rows[2] + rows[1], rows[0]}),
                 v.name);
    expect_equal(v.combine(normal({0, 5}, "rows"), ints({-1, -1}).view({2, 1})),
                 at::zeros({2, 5}, at::kDouble), "no rows");
    expect_equal(v.combine(normal({3}, "flat"), ints({2, 1, 0}).view({3, 1})),
                 normal({3}, "flat").flip(0), "flat");
  }
}

TEST(CombineRows, SumsBfloat16InFloat32) {
  // 1 + 2^-8 + 2^-8: rounding after each step would lose both small terms.
  for (const auto& v : kVersions) {
    const at::Tensor rows =
        at::tensor({1.0, 0.00390625, 0.00390625}).to(at::kBFloat16).view({3, 1}).to(test_device());
    const at::Tensor got = v.combine(rows, ints({0, 1, 2}).view({1, 3}));
    EXPECT_EQ(got.item<float>(), 1.0078125f) << v.name;
  }
}

TEST(RowsAdjoint, EachFunctionIsTheOthersAdjoint) {
  for (const auto& v : kVersions) {
    const Sorted s = sort_by_expert(choices(17, 3, 8), 8, {2, 4});
    const std::int64_t num_rows = s.token_R.numel();
    ASSERT_GT(num_rows, 0);
    ASSERT_LT(num_rows, 17 * 3);
    const at::Tensor x = normal({17, 6}, "x"), rows = normal({num_rows, 6}, "rows");
    const double a = (v.gather(x, s.token_R) * rows).sum().item<double>();
    const double b = (x * v.combine(rows, s.inverse_TK)).sum().item<double>();
    EXPECT_NEAR(a, b, 1e-12 * std::abs(a)) << v.name;
  }
}

}  // namespace
}  // namespace moesh::kernels
