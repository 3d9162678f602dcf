#pragma once
// Which tile a block works on, and where 16 bytes of a tile lie: plain functions of numbers, for
// the device, the host and the tests (which go through all of them).
//
// A tile is 128 rows (M) by 256 columns (N). Two neighbours along M are a pair: the two blocks of a
// cluster work on them at the same time, and share the other operand.
// E experts, R rows at their experts, sorted by expert without gaps

namespace moesh::kernels::cuda {

inline constexpr int kTileM = 128, kTileN = 256, kTileK = 64;
inline constexpr int kSlab = 64;  // rows of a tile which one warp group multiplies
inline constexpr int kGroup = 8;  // pairs that pass over all columns before the next ones do
inline constexpr int kMaxExperts = 512;

// By value: a reference to a constant of the host is a trap on the device.
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// Blocks in shared memory are rows of 128 bytes, in eight chunks of 16. The chunk moves with the
/// row, as TMA and wgmma do it: a column of chunks then lies in all banks.
constexpr int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

struct Place {
  int pair, column;
};

/// Place number `index` of num_pairs x num_columns. Groups of kGroup pairs walk through the columns
/// together: their rows and a few columns stay in L2.
constexpr Place place_at(int index, int num_pairs, int num_columns) {
  const int group = index / (kGroup * num_columns);
  const int size = smaller(kGroup, num_pairs - group * kGroup);
  const int inside = index - group * kGroup * num_columns;
  return {group * kGroup + inside % size, inside / size};
}

struct Tile {
  int expert = 0;
  int column = 0;      // tile along N
  int first_row = 0;   // of its rows: in R, or of the expert where the contraction runs over rows
  int num_rows = 0;    // rows; where the contraction runs over rows: of the expert
  int m = 0;           // first of the 128 along M; along R: first_row
  int height = 0;      // how many of the 128 exist; 0 or less: this block only helps its neighbour
  bool shared = true;  // both blocks of the pair want the same B
};

/// Tiles of the rows of experts. Expert e has rows row_starts[e] .. row_starts[e + 1] and tiles
/// tile_starts[e] .. tile_starts[e + 1]. A pair may straddle experts: it then shares nothing, and
/// no row is padded for it.
struct RowTiles {
  const int* row_starts;   // [E + 1]
  const int* tile_starts;  // [E + 1]
  int num_experts, num_columns;

  constexpr int num_pairs() const { return ceil_div(tile_starts[num_experts], 2); }
  constexpr int size() const { return num_pairs() * num_columns; }

  constexpr Tile at(int index, int rank) const {
    const Place place = place_at(index, num_pairs(), num_columns);
    const int last = tile_starts[num_experts] - 1, tile = 2 * place.pair + rank;
    const int mine = smaller(tile, last);
    int low = 0, high = num_experts;  // tile_starts[low] <= mine < tile_starts[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (tile_starts[middle] <= mine ? low : high) = middle;
    }
    const int neighbour = smaller(2 * place.pair + 1 - rank, last);
    Tile t;
    t.expert = low;
    t.column = place.column;
    t.first_row = t.m = row_starts[low] + (mine - tile_starts[low]) * kTileM;
    t.num_rows = t.height = tile > last ? 0 : smaller(kTileM, row_starts[low + 1] - t.first_row);
    t.shared = tile_starts[low] <= neighbour && neighbour < tile_starts[low + 1];
    return t;
  }
};

/// Tiles of a matrix per expert, [height, num_columns tiles]: expert after expert, so that its
/// rows, which all of its tiles read, stay in L2.
struct WeightTiles {
  const int* row_starts;  // [E + 1]
  int num_experts, height, num_columns;

  constexpr int num_pairs() const { return ceil_div(height, 2 * kTileM); }
  constexpr int size() const { return num_experts * num_pairs() * num_columns; }

  constexpr Tile at(int index, int rank) const {
    const int per_expert = num_pairs() * num_columns;
    Tile t;
    t.expert = index / per_expert;
    const Place place = place_at(index - t.expert * per_expert, num_pairs(), num_columns);
    t.column = place.column;
    t.first_row = row_starts[t.expert];
    t.num_rows = row_starts[t.expert + 1] - t.first_row;
    t.m = (2 * place.pair + rank) * kTileM;
    t.height = smaller(kTileM, height - t.m);
    return t;
  }
};

}  // namespace moesh::kernels::cuda
