// Every tile is visited once, whatever the counts; a swizzle loses nothing. By exhaustion, with the
// functions that the device uses.
#include "moesh/kernels/cuda/tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "moesh/kernels/cuda/float8.h"

namespace moesh::kernels::cuda {
namespace {

static_assert(ceil_div(1, 128) == 1 && ceil_div(128, 128) == 1 && ceil_div(0, 128) == 0);
static_assert(swizzled(0, 3) == 48 && swizzled(5, 3) == 5 * 128 + (3 ^ 5) * 16);

std::vector<int> starts_of(const std::vector<int>& counts) {
  std::vector<int> starts{0};
  for (const int n : counts) starts.push_back(starts.back() + n);
  return starts;
}

/// As the device makes them, one expert after the other.
struct RowTables {
  std::vector<int> row_starts, pair_starts{0}, partners;
  int left_over = -1;

  explicit RowTables(const std::vector<int>& counts) : row_starts(starts_of(counts)) {
    for (int e = 0; e < static_cast<int>(counts.size()); ++e) {
      const int tiles = ceil_div(counts[e], kTileM);
      const bool odd = tiles % 2 == 1, second = odd && left_over >= 0;
      partners.push_back(left_over);
      pair_starts.push_back(pair_starts.back() + tiles / 2 + second);
      if (odd) left_over = second ? -1 : e;
    }
  }
  RowTiles tiles(int columns) const {
    return {row_starts.data(), pair_starts.data(),
            partners.data(),   static_cast<int>(partners.size()),
            columns,           left_over};
  }
};

struct WeightTables {
  std::vector<int> row_starts, pair_starts{0}, order;
  int height, columns, longest, num_cut = 0;

  WeightTables(const std::vector<int>& counts, int height, int columns, int clusters, int max_pairs)
      : row_starts(starts_of(counts)), order(counts.size()), height(height), columns(columns) {
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return counts[a] > counts[b]; });
    const int pairs = ceil_div(height, 2 * kTileM) * columns, most = steps_of(counts[order[0]]);
    longest = longest_chunk(most, 0);
    int best = time_with(counts, longest, pairs, clusters, max_pairs);
    for (int i = 1; i < kCandidates; ++i) {
      if (has_many_tiles(most, row_starts.back(), pairs, clusters)) break;
      const int time = time_with(counts, longest_chunk(most, i), pairs, clusters, max_pairs);
      if (time >= 0 && time < best) best = time, longest = longest_chunk(most, i);
    }
    for (const int e : order) {
      const int chunks = num_chunks(steps_of(counts[e]), longest);
      pair_starts.push_back(pair_starts.back() + pairs * chunks);
      num_cut += chunks > 1;
    }
  }
  WeightTiles tiles() const {
    return {.row_starts = row_starts.data(),
            .pair_starts = pair_starts.data(),
            .order_E = order.data(),
            .num_experts = static_cast<int>(order.size()),
            .height = height,
            .num_columns = columns,
            .longest = longest,
            .num_cut = num_cut};
  }

 private:
  /// -1: no memory.
  int time_with(const std::vector<int>& counts, int longest, int pairs, int clusters,
                int max_pairs) const {
    int time = 0, start = 0;
    for (const int e : order) {
      const int steps = steps_of(counts[e]), chunks = num_chunks(steps, longest);
      time += time_of_chunks(steps, start, pairs, clusters, longest);
      start += pairs * chunks;
      if (chunks > 1 && start > max_pairs) return -1;
    }
    return time;
  }
};

std::vector<std::vector<int>> hard_counts() {
  std::vector<std::vector<int>> all = {
      {0}, {1}, {128}, {129}, {0, 0, 0}, {0, 1, 0}, {63, 64, 65, 127, 128, 129, 255, 256, 257}};
  for (int a : {0, 1, 127, 128, 129, 256, 300, 1000})
    for (int b : {0, 1, 128, 129, 513})
      for (int c : {0, 64, 1024}) all.push_back({a, b, c});
  std::mt19937 random(1);
  for (const int experts : {1, 2, 8, 31, 64, 256, kMaxExperts}) {
    std::vector<int> counts(experts);
    for (int& n : counts) n = random() % 3 == 0 ? 0 : static_cast<int>(random() % 700);
    all.push_back(counts);
  }
  return all;
}

TEST(Tiles, EveryPlaceOnce) {
  for (int pairs = 1; pairs <= 40; ++pairs) {
    for (int columns = 1; columns <= 30; ++columns) {
      std::set<std::pair<int, int>> seen;
      for (int i = 0; i < pairs * columns; ++i) {
        const TilePlace place = place_at(i, pairs, columns);
        ASSERT_TRUE(place.pair >= 0 && place.pair < pairs && place.column >= 0 &&
                    place.column < columns);
        ASSERT_TRUE(seen.emplace(place.pair, place.column).second);
      }
    }
  }
}

TEST(Tiles, EveryRowOnceInEveryColumn) {
  for (const auto& counts : hard_counts()) {
    const RowTables tables(counts);
    const int experts = static_cast<int>(counts.size());
    int num_odd = 0;
    for (const int n : counts) num_odd += ceil_div(n, kTileM) % 2;
    for (const int columns : {1, 2, 5, 16}) {
      const RowTiles tiles = tables.tiles(columns);
      std::map<std::pair<int, int>, int> rows;  // (expert, column) -> rows seen
      std::set<std::pair<int, int>> begins;     // (first row, column)
      int num_apart = 0;                        // pairs that share nothing
      for (int i = 0; i < tiles.size(); ++i) {
        const Tile pair[2] = {tiles.at(i, 0), tiles.at(i, 1)};
        ASSERT_EQ(pair[0].column, pair[1].column);
        ASSERT_EQ(pair[0].shared, pair[1].shared);
        ASSERT_EQ(pair[0].shared, pair[0].expert == pair[1].expert);
        num_apart += !pair[0].shared;
        for (const Tile& t : pair) {
          ASSERT_EQ(t.height, t.num_rows);
          ASSERT_EQ(t.num_chunks, 1);
          if (t.num_rows == 0) continue;
          ASSERT_LE(t.num_rows, kTileM);
          ASSERT_GE(t.first_row, tables.row_starts[t.expert]);
          ASSERT_LE(t.first_row + t.num_rows, tables.row_starts[t.expert + 1]);
          ASSERT_EQ((t.first_row - tables.row_starts[t.expert]) % kTileM, 0);
          ASSERT_TRUE(begins.emplace(t.first_row, t.column).second);
          rows[{t.expert, t.column}] += t.num_rows;
        }
        ASSERT_GT(pair[0].num_rows, 0);
      }
      ASSERT_EQ(num_apart, num_odd / 2 * columns);
      for (int e = 0; e < experts; ++e)
        for (int n = 0; n < columns; ++n) ASSERT_EQ((rows[{e, n}]), counts[e]);
    }
  }
}

/// Every step of every tile once, the chunks of a tile in order, and sums of chunks side by side.
void check_weight_tiles(const std::vector<int>& counts, const WeightTables& tables, int max_pairs) {
  const WeightTiles tiles = tables.tiles();
  std::map<std::tuple<int, int, int>, std::vector<Tile>> seen;  // by expert, m, column
  std::set<std::pair<int, int>> slots;
  int before = std::numeric_limits<int>::max();
  for (int i = 0; i < tiles.size(); ++i) {
    for (const int rank : {0, 1}) {
      const Tile t = tiles.at(i, rank);
      ASSERT_TRUE(t.shared);
      ASSERT_LE(counts[t.expert], before);
      before = counts[t.expert];
      if (t.num_chunks > 1) {
        const int slot = t.slot + t.chunk * tiles.pairs_of_expert();
        ASSERT_LT(slot, max_pairs);
        ASSERT_TRUE(slots.emplace(slot, rank).second);
      }
      if (t.height <= 0) continue;
      ASSERT_EQ(t.height, smaller(kTileM, tables.height - t.m));
      auto& chunks = seen[{t.expert, t.m, t.column}];
      if (!chunks.empty()) {
        ASSERT_EQ(t.slot, chunks[0].slot);
      }
      chunks.push_back(t);
    }
  }
  const auto places = counts.size() * ceil_div(tables.height, kTileM) * tables.columns;
  ASSERT_EQ(seen.size(), places);
  for (const auto& [place, chunks] : seen) {
    int row = tables.row_starts[std::get<0>(place)];
    for (int chunk = 0; chunk < static_cast<int>(chunks.size()); ++chunk) {
      const Tile& t = chunks[chunk];
      ASSERT_EQ(t.chunk, chunk);
      ASSERT_EQ(t.num_chunks, static_cast<int>(chunks.size()));
      ASSERT_EQ(t.first_row, row);
      ASSERT_LE(t.num_rows, tables.longest * kTileK);
      if (chunk + 1 < t.num_chunks) {
        ASSERT_TRUE(t.num_rows > 0 && t.num_rows % kTileK == 0);
      }
      row += t.num_rows;
    }
    ASSERT_EQ(row, tables.row_starts[std::get<0>(place) + 1]);
  }
}

TEST(Tiles, EveryStepOfEveryWeightOnce) {
  for (const auto& counts : hard_counts()) {
    if (counts.size() > 64) continue;
    for (const int height : {8, 128, 136, 264, 2048})
      for (const int columns : {1, 3, 8}) {
        const int pairs = ceil_div(height, 2 * kTileM) * columns;
        const int max_pairs = max_chunk_pairs(starts_of(counts).back(), pairs);
        const WeightTables tables(counts, height, columns, 66, max_pairs);
        ASSERT_NO_FATAL_FAILURE(check_weight_tiles(counts, tables, max_pairs));
      }
  }
}

/// The rows of layers whose routing collapsed: chunks, and how busy the clusters are.
TEST(Tiles, FewExpertsWithAllRowsAreCutIntoChunks) {
  struct Case {
    int rows, experts, pairs_high, columns;
    bool in_chunks;
    double busiest;  // of the clusters, beside the mean
  };
  for (const Case& c : {Case{16384, 6, 4, 4, true, 1.08}, Case{16384, 6, 4, 2, false, 1.4},
                        Case{16384, 4, 4, 4, false, 1.08}, Case{16384, 4, 4, 2, true, 1.08},
                        Case{3072, 32, 4, 4, false, 1.08}, Case{700, 1, 1, 1, false, 67.},
                        Case{2000, 1, 2, 2, false, 17.}, Case{5000, 1, 2, 2, true, 3.}}) {
    std::vector<int> counts(32, c.experts == 32 ? c.rows : 0);
    for (int i = 0; i < c.experts; ++i) counts[(i * 5 + 3) % 32] = c.rows;
    const int height = c.pairs_high * 2 * kTileM, pairs = c.pairs_high * c.columns;
    const int max_pairs = max_chunk_pairs(starts_of(counts).back(), pairs), clusters = 66;
    const WeightTables tables(counts, height, c.columns, clusters, max_pairs);
    ASSERT_NO_FATAL_FAILURE(check_weight_tiles(counts, tables, max_pairs));
    const WeightTiles tiles = tables.tiles();
    EXPECT_EQ(tiles.at(0, 0).num_chunks > 1, c.in_chunks) << c.rows << " " << c.experts;
    std::vector<int> steps(clusters, 0);
    for (int i = 0; i < tiles.size(); ++i)
      if (tiles.at(i, 0).num_rows > 0) steps[i % clusters] += steps_of(tiles.at(i, 0).num_rows);
    const int sum = std::accumulate(steps.begin(), steps.end(), 0);
    EXPECT_LT(*std::max_element(steps.begin(), steps.end()), c.busiest * sum / clusters);
  }
}

TEST(Tiles, SwizzleIsABijectionWithoutBankConflicts) {
  std::set<int> seen;
  for (int row = 0; row < 128; ++row)
    for (int chunk = 0; chunk < 8; ++chunk) {
      const int at = swizzled(row, chunk);
      ASSERT_EQ(at / 128, row);
      ASSERT_EQ(at % 16, 0);
      ASSERT_TRUE(seen.insert(at).second);
    }
  for (int row = 0; row < 128; row += 8)  // a column of chunks over eight rows: all banks
    for (int chunk = 0; chunk < 8; ++chunk) {
      std::set<int> banks;
      for (int i = 0; i < 8; ++i) banks.insert(swizzled(row + i, chunk) % 128);
      ASSERT_EQ(banks.size(), 8u);
    }
}

// The scale of every magnitude that a bfloat16 has, and of the float32 beside it, by the
// definition.
TEST(Float8, ScalesFollowTheDefinition) {
  for (std::uint32_t high = 0; high < 0x8000; ++high)
    for (const std::uint32_t low : {0u, 1u, 0xFFFFu}) {
      const std::uint32_t bits = high << 16 | low;
      const double largest = std::bit_cast<float>(bits);
      const std::uint32_t scale = float8_scale(bits);
      const double got = std::bit_cast<float>(scale),
                   inverse = std::bit_cast<float>(float8_inverse(scale));
      if (!std::isfinite(largest)) {
        ASSERT_TRUE(std::isnan(got) && std::isnan(inverse)) << largest;
        continue;
      }
      double want = std::exp2(-200);
      while (want < std::max(largest, 1e-27) / 448) want *= 2;
      ASSERT_EQ(got, want) << largest;
      ASSERT_EQ(got * inverse, 1) << largest;
    }
}

}  // namespace
}  // namespace moesh::kernels::cuda
