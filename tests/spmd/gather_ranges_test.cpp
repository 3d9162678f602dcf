#include "moesh/spmd/gather_ranges.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/spmd/spmd.h"
#include "moesh/types/token.h"
#include "tests/comm/trace.h"
#include "tests/spmd/device.h"
#include "tests/support.h"

namespace moesh {
namespace {

using enum Place;

// What each of the ranks asks for, of what it holds, which may be nothing: the whole; some more
// before each of its ranges; some more before and after; nothing of others; and only rank 0 the
// whole.
constexpr int kWays = 5;
std::vector<PositionRanges> asked_of(int way, const std::vector<PositionRanges>& held,
                                     std::int64_t all) {
  const std::int64_t before = way == 1 ? 2 : way == 2 ? 1 : 0, after = way == 2 ? 3 : 0;
  std::vector<PositionRanges> asked;
  for (const PositionRanges& ranges : held) {
    PositionRanges& mine = asked.emplace_back();
    if (way == 0 || (way == 4 && asked.size() == 1)) {
      mine = {{0, all}};
      continue;
    }
    for (const PositionRange& r : ranges) {
      if (r.length() == 0) continue;
      const PositionRange more{std::max<std::int64_t>(0, r.begin - before),
                               std::min(all, r.end + after)};
      if (!mine.empty() && more.begin <= mine.back().end)
        mine.back().end = more.end;
      else
        mine.push_back(more);
    }
  }
  return asked;
}

at::Tensor rows(const at::Tensor& whole, std::int64_t dim, const PositionRanges& ranges) {
  std::vector<at::Tensor> parts{whole.narrow(dim, 0, 0)};
  for (const PositionRange& r : ranges) parts.push_back(whole.narrow(dim, r.begin, r.length()));
  return at::cat(parts, dim);
}

TEST(GatherRanges, GivesTheRowsAskedForAndTheirGradientsComeBack) {
  for (const SequenceCut cut : {SequenceCut::contiguous, SequenceCut::balanced})
    for (int ranks : {1, 2, 3, 4, 8})
      for (std::int64_t length : {7, 8, 3, 17})
        for (int way = 0; way < kWays; ++way)
          for (std::int64_t dim : {0, 1}) {
            SCOPED_TRACE(testing::Message()
                         << (cut == SequenceCut::balanced ? "balanced, " : "contiguous, ") << ranks
                         << " ranks, " << length << " rows, way " << way << ", dim " << dim);
            std::vector<std::int64_t> shape{2, 2, 3};
            shape[static_cast<size_t>(dim)] = length;
            const at::Tensor whole = at::randn(shape, at::kDouble).to(test_device());
            std::vector<PositionRanges> held;
            for (int r = 0; r < ranks; ++r)
              held.push_back(SequenceShard(1, length, ranks, r, 1, cut).ranges());
            const RangesOfRanks ranges{
                .dim = dim, .held = held, .asked = asked_of(way, held, length)};
            comm::launch(
                ranks,
                [&](comm::Group& world) {
                  const Mesh mesh(world, {.cp = ranks});
                  const MeshScope scope(mesh);
                  const auto mine = static_cast<size_t>(world.rank());
                  const auto x =
                      as_leaf(assume<Dense{T, T, F}>(rows(whole, dim, ranges.held[mine])));
                  const comm::Trace trace;
                  const auto y = dim == 0 ? gather_ranges<cp>(x, ranges)
                                          : start_gather_ranges<cp>(x, ranges).wait();
                  if (way == 3) {
                    EXPECT_TRUE(trace.entries().empty()) << "nobody asks for anything";
                  }
                  EXPECT_TRUE(at::equal(local(y).detach(), rows(whole, dim, ranges.asked[mine])));
                  // Rank r weighs its copy of a row by r + 1: a row's gradient is the sum of those.
                  local(y).backward(at::full_like(local(y), world.rank() + 1.0));
                  at::Tensor expected = at::zeros_like(whole);
                  for (int r = 0; r < ranks; ++r)
                    for (const PositionRange& a : ranges.asked[static_cast<size_t>(r)])
                      expected.narrow(dim, a.begin, a.length()) += r + 1;
                  EXPECT_TRUE(at::equal(local(x).grad(), rows(expected, dim, ranges.held[mine])));
                },
                test_options());
          }
}

TEST(GatherRanges, NamesARankThatDoesNotAskForItsOwn) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const auto x = assume<Dense{T, T, F}>(at::ones({4, 1}));
  const auto error = [&](const PositionRanges& asked) {
    return error_of(
        [&] { gather_ranges<cp>(x, {.dim = 0, .held = {{{0, 2}, {2, 4}}}, .asked = {asked}}); },
        ErrorKind::internal);
  };
  expect_parts(error({{1, 4}}), {"rank 0 holds [0, 2) and [2, 4)", "asks for [1, 4)"});
  expect_parts(error({{0, 5}}), {"rank 0 asks for [0, 5) of 4 rows"});
}

// Rows that lie as ranges one behind the other, and by their positions.
TEST(GatherRanges, PutsRowsInOrderAndBack) {
  const at::Tensor whole = at::arange(10).reshape({1, 10});
  const PositionRanges ranges{{0, 2}, {8, 10}, {2, 4}, {6, 8}, {4, 6}};
  const at::Tensor by_ranges = raw::rows_at(whole, 1, ranges);
  EXPECT_TRUE(at::equal(by_ranges, at::tensor({0, 1, 8, 9, 2, 3, 6, 7, 4, 5}).reshape({1, 10})));
  EXPECT_TRUE(at::equal(raw::by_position(by_ranges, 1, ranges), whole));
  EXPECT_TRUE(raw::rows_at(whole, 1, {{0, 4}, {4, 10}}).is_same(whole)) << "no copy";
  EXPECT_TRUE(raw::by_position(whole, 1, {{0, 4}, {4, 10}}).is_same(whole));
}

}  // namespace
}  // namespace moesh
