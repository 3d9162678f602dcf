#include "moesh/kernels/routing.h"

#include "moesh/base/error.h"
#include "moesh/kernels/table.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

TEST(TopK, IsAStableDescendingSort) {
  for (auto dtype : {at::kFloat, at::kDouble}) {
    for (std::int64_t num_experts : {1, 2, 3, 7, 8, 9, 31, 33, 256}) {
      for (std::int64_t num_tokens : {0, 1, 5, 130}) {
        // Few distinct values: most rows hold ties.
        const at::Tensor scores = at::floor(normal({num_tokens, num_experts}, "scores", dtype, 2));
        const auto [values, experts] =
            at::sort(scores, /*stable=*/true, /*dim=*/1, /*descending=*/true);
        for (std::int64_t k : {std::int64_t{1}, (num_experts + 1) / 2, num_experts}) {
          const Poison poison;
          const TopK got = top_k(scores, k);
          expect_equal(got.values_TK, values.narrow(1, 0, k), "values");
          expect_equal(got.experts_TK, experts.narrow(1, 0, k), "experts");
        }
      }
    }
  }
}

TEST(TopK, LowestIndexWinsTies) {
  const TopK all_equal = top_k(at::ones({2, 5}, test_device()), 3);
  expect_equal(all_equal.experts_TK, longs({0, 1, 2, 0, 1, 2}).view({2, 3}), "all equal");
  const TopK some = top_k(at::tensor({1., 3., 3., 2., 3.}).view({1, 5}).to(test_device()), 4);
  expect_equal(some.experts_TK, longs({1, 2, 4, 3}).view({1, 4}), "some equal");
}

TEST(TopK, MaskedExpertsComeLast) {
  const double inf = std::numeric_limits<double>::infinity();
  const TopK got =
      top_k(at::tensor({-inf, -5., -inf, inf}, at::kDouble).view({1, 4}).to(test_device()), 4);
  expect_equal(got.experts_TK, longs({3, 1, 0, 2}).view({1, 4}), "masked");
}

TEST(TopK, NanNamesTheToken) {
  at::Tensor scores = normal({300, 9}, "scores", at::kFloat);
  scores[217][4] = std::numeric_limits<float>::quiet_NaN();
  scores[250][0] = std::numeric_limits<float>::quiet_NaN();
  if (kernels_for(test_device()).top_k ==
      ampere_kernels().top_k) {  // nobody waits: it goes to the loss
    const TopK got = top_k(scores, 2);
    EXPECT_EQ(got.experts_TK[217][0].item<std::int64_t>(), 4);
    EXPECT_EQ(got.experts_TK[250][0].item<std::int64_t>(), 0);
    EXPECT_TRUE(std::isnan(got.values_TK[217][0].item<float>()));
    return;
  }
  try {
    top_k(scores, 2);
    FAIL() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::data);
    EXPECT_NE(std::string(e.what()).find("token 217 "), std::string::npos) << e.what();
  }
  EXPECT_THROW(aten_kernels().top_k(scores, 2), Error);
}

TEST(TopK, RefusesWhatItCannotDo) {
  const at::Tensor scores = normal({3, 4}, "scores");
  EXPECT_THROW(top_k(scores, 0), Error);
  EXPECT_THROW(top_k(scores, 5), Error);
  EXPECT_THROW(top_k(scores.to(at::kBFloat16), 1), Error);
  EXPECT_THROW(top_k(scores[0], 1), Error);
}

TEST(TopK, LibtorchVersionAgrees) {
  const at::Tensor scores = at::floor(normal({50, 16}, "scores", at::kFloat, 2));
  const TopK a = top_k(scores, 6), b = aten_kernels().top_k(scores, 6);
  expect_equal(a.values_TK, b.values_TK, "values");
  expect_equal(a.experts_TK, b.experts_TK, "experts");
}

}  // namespace
}  // namespace moesh::kernels
