#include "moesh/comm/observers.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "moesh/comm/launch.h"

namespace moesh::comm {
namespace {

// By hand: a ring of four ranks, 120 bytes in, 30 of them the rank's own.
TEST(Sent, IsWhatARingMoves) {
  EXPECT_EQ(sent_bytes(Collective::all_reduce, 120, 0, 4), 2 * 90);
  EXPECT_EQ(sent_bytes(Collective::all_gather, 120, 0, 4), 360);
  EXPECT_EQ(sent_bytes(Collective::reduce_scatter, 120, 30, 4), 90);
  EXPECT_EQ(sent_bytes(Collective::all_to_all, 120, 30, 4), 90);
  EXPECT_EQ(sent_bytes(Collective::broadcast, 120, 0, 4), 90);
  EXPECT_EQ(sent_bytes(Collective::barrier, 0, 0, 4), 0);
}

// With and without a wrapper that sends more on its own account.
TEST(Sent, IsCountedByGroupUntilItIsTaken) {
  for (const bool is_checked : {false, true})
    launch(4,
           [](Group& world) {
             const auto pair = world.split(world.rank() / 2, world.rank(), "pair");
             const at::Tensor x = at::zeros({4, 3}, at::kFloat);  // 48 bytes
             world.all_reduce(x);                                 // nobody counts
             SentBytes sent;
             world.all_reduce(x);
             pair->all_gather(x);
             pair->reduce_scatter(x, {1, 3});
             pair->all_to_all(x, {pair->rank() == 0 ? 3 : 1, pair->rank() == 0 ? 1 : 3},
                              {pair->rank() == 0 ? 3 : 1, pair->rank() == 0 ? 1 : 3});
             const std::int64_t kept = pair->rank() == 0 ? 12 : 36;
             const std::map<std::string, std::int64_t> expected{{"world", 2 * 48 * 3 / 4},
                                                                {"pair", 48 + 48 - kept + 12}};
             EXPECT_EQ(sent.take(), expected);
             EXPECT_TRUE(sent.take().empty());
           },
           {.checked = is_checked});
}

}  // namespace
}  // namespace moesh::comm
