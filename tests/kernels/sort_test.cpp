#include "moesh/kernels/routing.h"

#include "moesh/base/error.h"
#include "moesh/kernels/table.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

at::Tensor random_experts(std::int64_t num_tokens, std::int64_t k, std::int64_t num_experts) {
  at::Tensor out = at::empty({num_tokens, k}, at::kLong);
  const Random random(2, "experts");
  for (std::int64_t i = 0; i < out.numel(); ++i)
    out.data_ptr<std::int64_t>()[i] = static_cast<std::int64_t>(random.below(i, num_experts));
  return out.to(test_device());
}

// The public version for the test device, and the LibTorch one on it.
using Sort = Sorted (*)(const at::Tensor&, std::int64_t, ExpertRange);
const Sort kSortVersions[] = {sort_by_expert, aten_kernels().sort_by_expert};
using Reorder = Reordered (*)(const at::Tensor&, at::Device);
const Reorder kReorderVersions[] = {rank_major_to_expert_major,
                                    aten_kernels().rank_major_to_expert_major};

at::Tensor counted(const Sorted& s) { return counts_of(s.ends_e); }

TEST(SortByExpert, IsTheStableSort) {
  for (const Sort sort : kSortVersions) {
    for (std::int64_t num_experts : {1, 2, 3, 9, 64}) {
      for (std::int64_t num_tokens : {0, 1, 2, 7, 33, 200}) {
        for (std::int64_t k : {1, 2, 3}) {
          const at::Tensor experts = random_experts(num_tokens, k, num_experts);
          const Poison poison;
          const Sorted s = sort(experts, num_experts, {0, num_experts});
          const at::Tensor order =
              at::argsort(experts.flatten(), /*stable=*/true, /*dim=*/0, /*descending=*/false);
          expect_equal(s.order_R, order.to(at::kInt), "order");
          expect_equal(s.token_R, order.div(k, "floor").to(at::kInt), "token");
          const at::Tensor counts = at::bincount(experts.flatten(), {}, num_experts);
          expect_equal(s.ends_e, counts.cumsum(0).to(at::kInt), "ends");
          expect_equal(counts_of(s.ends_e), counts, "counts");
        }
      }
    }
  }
}

TEST(SortByExpert, InverseUndoesTheOrder) {
  for (const Sort sort : kSortVersions) {
    const at::Tensor experts = random_experts(50, 3, 7);
    const Sorted s = sort(experts, 7, {0, 7});
    expect_equal(s.inverse_TK.flatten().index_select(0, s.order_R),
                 at::arange(150, s.order_R.options()), "inverse after order");
    expect_equal(s.order_R.index_select(0, s.inverse_TK.flatten()),
                 at::arange(150, s.order_R.options()), "order after inverse");
    EXPECT_EQ(counted(s).sum().item<std::int64_t>(), 150);
  }
}

TEST(SortByExpert, ARangeIsAPartOfTheWhole) {
  for (const Sort sort : kSortVersions) {
    const at::Tensor experts = random_experts(40, 2, 9);
    const Sorted all = sort(experts, 9, {0, 9});
    for (const ExpertRange range : {ExpertRange{0, 4}, ExpertRange{4, 5}, ExpertRange{3, 1},
                                    ExpertRange{9, 0}, ExpertRange{2, 0}}) {
      const Poison poison;
      const Sorted part = sort(experts, 9, range);
      const std::int64_t skipped =
          counted(all).narrow(0, 0, range.first).sum().item<std::int64_t>();
      expect_equal(counted(part), counted(all).narrow(0, range.first, range.count), "counts");
      const std::int64_t num_rows = counted(part).sum().item<std::int64_t>();
      expect_equal(part.order_R, all.order_R.narrow(0, skipped, num_rows), "order");
      expect_equal(part.token_R, all.token_R.narrow(0, skipped, num_rows), "token");
      const at::Tensor shifted = all.inverse_TK - skipped;
      expect_equal(part.inverse_TK,
                   at::where(at::logical_and(shifted >= 0, shifted < num_rows), shifted,
                             at::full_like(shifted, -1)),
                   "inverse");
    }
  }
}

TEST(SortByExpert, NamesAWrongChoiceOnTheCpu) {  // a device asserts by itself
  for (const Sort sort : kSortVersions) {
    try {
      sort(at::tensor({0, 1, 2, 4}, at::kLong).view({2, 2}), 4, {0, 4});
      FAIL() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_STREQ(e.what(), "token 1 chose expert 4 of 4 (choice 1)");
    }
    EXPECT_THROW(sort(at::tensor({-1}, at::kLong).view({1, 1}), 4, {0, 4}), Error);
  }
  EXPECT_THROW(sort_by_expert(longs({0}).view({1, 1}), 4, {2, 3}), Error);
  EXPECT_THROW(sort_by_expert(longs({0}), 4), Error);
  EXPECT_THROW(sort_by_expert(at::zeros({2, 2}, test_device()), 4), Error);
}

TEST(RankMajorToExpertMajor, WorkedExamples) {
  for (const Reorder reorder : kReorderVersions) {
    const Reordered a = reorder(at::tensor({2, 3, 1, 4}, at::kLong).view({2, 2}), test_device());
    expect_equal(a.index_R, ints({0, 1, 5, 2, 3, 4, 6, 7, 8, 9}), "index");
    expect_equal(a.ends_e, ints({3, 10}), "ends");
    const Reordered b = reorder(at::tensor({0, 3, 2, 0}, at::kLong).view({2, 2}), test_device());
    expect_equal(b.index_R, ints({3, 4, 0, 1, 2}), "index");
    expect_equal(b.ends_e, ints({2, 5}), "ends");
  }
}

TEST(RankMajorToExpertMajor, IsAPermutationSortedByExpertThenRank) {
  const Random random(3, "counts");
  for (std::int64_t num_ranks : {1, 2, 3, 5}) {
    for (std::int64_t num_experts : {1, 2, 4}) {
      at::Tensor counts = at::empty({num_ranks, num_experts}, at::kLong);
      std::vector<std::int64_t> expert_of, rank_of;
      for (std::int64_t i = 0; i < counts.numel(); ++i) {
        const auto count =
            static_cast<std::int64_t>(random.below(100 * num_ranks + 10 * num_experts + i, 4));
        counts.data_ptr<std::int64_t>()[i] = count;
        expert_of.insert(expert_of.end(), count, i % num_experts);
        rank_of.insert(rank_of.end(), count, i / num_experts);
      }
      const auto num_rows = static_cast<std::int64_t>(expert_of.size());
      const at::Tensor key = longs(expert_of) * num_ranks + longs(rank_of);
      for (const Reorder reorder : kReorderVersions) {
        const Reordered r = reorder(counts, test_device());
        expect_equal(counts_of(r.ends_e), counts.sum(0), "counts");
        expect_equal(gather_rows(r.index_R, r.inverse_R), at::arange(num_rows, r.index_R.options()),
                     "inverse");
        expect_equal(gather_rows(key, r.index_R), std::get<0>(key.sort()), "sorted keys");
        expect_equal(r.index_R, at::argsort(key, /*stable=*/true, 0, false).to(at::kInt), "stable");
      }
    }
  }
  EXPECT_THROW(rank_major_to_expert_major(at::tensor({1, -2}, at::kLong).view({1, 2})), Error);
}

}  // namespace
}  // namespace moesh::kernels
