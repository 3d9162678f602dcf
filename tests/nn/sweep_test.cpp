#include "tests/nn/sweep.h"

#include <gtest/gtest.h>

#include <set>

namespace moesh::sweep {
namespace {

// What moe_sweep --all and docs/running.md claim, counted without the sweep's own loop.
TEST(MoeSweep, RunsEveryCombination) {
  std::set<std::vector<int>> combinations, pairs;
  for (const Choice& c : every_choice()) {
    const auto v = c.levels();
    combinations.insert(v);
    for (int a = 0; a < static_cast<int>(v.size()); ++a)
      for (int b = a + 1; b < static_cast<int>(v.size()); ++b)
        pairs.insert({a, v[static_cast<size_t>(a)], b, v[static_cast<size_t>(b)]});
  }
  // sequence_parallel, side, dispatcher without auto, shared, batch, length, variant
  EXPECT_EQ(combinations.size(), 2u * 2 * 3 * 2 * 2 * 3 * 4);
  EXPECT_EQ(every_choice().size(), combinations.size());
  EXPECT_EQ(pairs.size(), num_pairs() - 15);  // auto with each of the 15 other values
}

}  // namespace
}  // namespace moesh::sweep
