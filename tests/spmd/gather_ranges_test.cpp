#include "moesh/spmd/gather_ranges.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/spmd/spmd.h"
#include "moesh/types/token.h"
#include "tests/spmd/device.h"
#include "tests/support.h"

namespace moesh {
namespace {

using enum Place;

// What each of the ranks asks for, of pieces that are uneven and may be empty: the whole, itself
// and some before and after, nothing of others; and a single rank the whole.
std::vector<std::vector<PositionRange>> ranges_of(const std::vector<PositionRange>& pieces) {
  const std::int64_t all = pieces.back().end;
  std::vector<std::vector<PositionRange>> ways(5);
  for (const PositionRange& p : pieces) {
    const bool is_empty = p.begin == p.end;
    ways[0].push_back({0, all});
    ways[1].push_back(is_empty ? p : PositionRange{std::max<std::int64_t>(0, p.begin - 2), p.end});
    ways[2].push_back(
        is_empty ? p
                 : PositionRange{std::max<std::int64_t>(0, p.begin - 1), std::min(all, p.end + 3)});
    ways[3].push_back(p);
    ways[4].push_back(ways[4].empty() ? PositionRange{0, all} : p);
  }
  return ways;
}

TEST(PositionRange, GivesTheRowsAskedForAndTheirGradientsComeBack) {
  for (int ranks : {1, 2, 3, 4, 8})
    for (std::int64_t length : {7, 8, 3})
      for (size_t way = 0; way < 5; ++way)
        for (std::int64_t dim : {0, 1}) {
          std::vector<std::int64_t> shape{2, 2, 3};
          shape[static_cast<size_t>(dim)] = length;
          const at::Tensor whole = at::randn(shape, at::kDouble).to(test_device());
          comm::launch(
              ranks,
              [&](comm::Group& world) {
                const Mesh mesh(world, {.cp = ranks});
                const MeshScope scope(mesh);
                const Pieces pieces{length, ranks};
                std::vector<PositionRange> owned;
                for (int r = 0; r < ranks; ++r)
                  owned.push_back({pieces.start(r), pieces.start(r) + pieces.length(r)});
                const auto ranges = ranges_of(owned)[way];
                const SplitDim along{.dim = dim, .sizes = pieces.lengths()};
                const PositionRange own = owned[static_cast<size_t>(world.rank())],
                                    asked = ranges[static_cast<size_t>(world.rank())];
                const auto x = as_leaf(
                    assume<Dense{T, T, F}>(whole.narrow(dim, own.begin, own.end - own.begin)));
                const comm::Trace trace;
                const auto y = dim == 0 ? gather_ranges<cp>(x, along, ranges)
                                        : start_gather_ranges<cp>(x, along, ranges).wait();
                if (way == 3) {
                  EXPECT_TRUE(trace.entries().empty()) << "nobody asks for anything";
                }
                EXPECT_TRUE(at::equal(local(y).detach(),
                                      whole.narrow(dim, asked.begin, asked.end - asked.begin)))
                    << ranks << " ranks, " << length << " rows, way " << way;
                // Rank r weighs its copy of a row by r + 1: a row's gradient is the sum of those.
                local(y).backward(at::full_like(local(y), world.rank() + 1.0));
                at::Tensor expected = at::zeros_like(whole);
                for (int r = 0; r < ranks; ++r) {
                  const PositionRange& a = ranges[static_cast<size_t>(r)];
                  expected.narrow(dim, a.begin, a.end - a.begin) += r + 1;
                }
                EXPECT_TRUE(at::equal(local(x).grad(),
                                      expected.narrow(dim, own.begin, own.end - own.begin)))
                    << ranks << " ranks, " << length << " rows, way " << way;
              },
              test_options());
        }
}

TEST(PositionRange, NamesARankThatDoesNotAskForItsOwn) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const auto x = assume<Dense{T, T, F}>(at::ones({4, 1}));
  expect_parts(error_of([&] { gather_ranges<cp>(x, {.dim = 0, .sizes = {4}}, {{1, 4}}); },
                        ErrorKind::internal),
               {"rank 0 holds [0, 4)", "asks for [1, 4)"});
  expect_parts(error_of([&] { gather_ranges<cp>(x, {.dim = 0, .sizes = {4}}, {{0, 5}}); },
                        ErrorKind::internal),
               {"rank 0 asks for [0, 5) of 4 rows"});
}

}  // namespace
}  // namespace moesh
