// Every tile is visited once, whatever the counts; a swizzle loses nothing. By exhaustion, with the
// functions that the device uses.
#include "moesh/kernels/cuda/tiles.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace moesh::kernels::cuda {
namespace {

static_assert(ceil_div(1, 128) == 1 && ceil_div(128, 128) == 1 && ceil_div(0, 128) == 0);
static_assert(swizzled(0, 3) == 48 && swizzled(5, 3) == 5 * 128 + (3 ^ 5) * 16);

struct Tables {
  std::vector<int> row_starts{0}, tile_starts{0};
  explicit Tables(const std::vector<int>& counts) {
    for (const int n : counts) {
      row_starts.push_back(row_starts.back() + n);
      tile_starts.push_back(tile_starts.back() + ceil_div(n, kTileM));
    }
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
        const Place place = place_at(i, pairs, columns);
        ASSERT_TRUE(place.pair >= 0 && place.pair < pairs && place.column >= 0 &&
                    place.column < columns);
        ASSERT_TRUE(seen.emplace(place.pair, place.column).second);
      }
    }
  }
}

TEST(Tiles, EveryRowOnceInEveryColumn) {
  for (const auto& counts : hard_counts()) {
    const Tables tables(counts);
    const int experts = static_cast<int>(counts.size());
    for (const int columns : {1, 2, 5, 16}) {
      const RowTiles tiles{tables.row_starts.data(), tables.tile_starts.data(), experts, columns};
      std::map<std::pair<int, int>, int> rows;  // (expert, column) -> rows seen
      std::set<std::pair<int, int>> begins;     // (first row, column)
      for (int i = 0; i < tiles.size(); ++i) {
        const Tile pair[2] = {tiles.at(i, 0), tiles.at(i, 1)};
        ASSERT_EQ(pair[0].column, pair[1].column);
        ASSERT_EQ(pair[0].shared, pair[1].shared);
        ASSERT_EQ(pair[0].shared, pair[0].expert == pair[1].expert);
        for (const Tile& t : pair) {
          if (t.num_rows == 0) continue;
          ASSERT_EQ(t.height, t.num_rows);
          ASSERT_LE(t.num_rows, kTileM);
          ASSERT_GE(t.first_row, tables.row_starts[t.expert]);
          ASSERT_LE(t.first_row + t.num_rows, tables.row_starts[t.expert + 1]);
          ASSERT_EQ((t.first_row - tables.row_starts[t.expert]) % kTileM, 0);
          ASSERT_TRUE(begins.emplace(t.first_row, t.column).second);
          rows[{t.expert, t.column}] += t.num_rows;
        }
        ASSERT_GT(pair[0].num_rows, 0);
      }
      for (int e = 0; e < experts; ++e)
        for (int n = 0; n < columns; ++n) ASSERT_EQ((rows[{e, n}]), counts[e]);
    }
  }
}

TEST(Tiles, EveryTileOfEveryWeightOnce) {
  for (const auto& counts : hard_counts()) {
    if (counts.size() > 64) continue;
    const Tables tables(counts);
    const int experts = static_cast<int>(counts.size());
    for (const int height : {8, 64, 128, 136, 256, 264, 2048, 7168}) {
      for (const int columns : {1, 3, 8}) {
        const WeightTiles tiles{tables.row_starts.data(), experts, height, columns};
        std::set<std::tuple<int, int, int>> seen;
        for (int i = 0; i < tiles.size(); ++i) {
          for (const int rank : {0, 1}) {
            const Tile t = tiles.at(i, rank);
            ASSERT_EQ(t.first_row, tables.row_starts[t.expert]);
            ASSERT_EQ(t.num_rows, counts[t.expert]);
            ASSERT_TRUE(t.shared);
            if (t.height <= 0) continue;
            ASSERT_EQ(t.height, smaller(kTileM, height - t.m));
            ASSERT_TRUE(seen.emplace(t.expert, t.m, t.column).second);
          }
        }
        ASSERT_EQ(seen.size(), static_cast<size_t>(experts * ceil_div(height, kTileM) * columns));
      }
    }
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

}  // namespace
}  // namespace moesh::kernels::cuda
