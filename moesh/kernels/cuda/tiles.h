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
inline constexpr int kFloat8Tile = 128;  // numbers of float8 that share a scale, or squared

// By value: a reference to a constant of the host is a trap on the device.
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// Blocks in shared memory are rows of 128 bytes, in eight chunks of 16. The chunk moves with the
/// row, as TMA and wgmma do it: a column of chunks then lies in all banks.
constexpr int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

struct TilePlace {
  int pair, column;
};

/// Place number `index` of num_pairs x num_columns. Groups of kGroup pairs walk through the columns
/// together: their rows and a few columns stay in L2.
constexpr TilePlace place_at(int index, int num_pairs, int num_columns) {
  const int group = index / (kGroup * num_columns);
  const int size = smaller(kGroup, num_pairs - group * kGroup);
  const int inside = index - group * kGroup * num_columns;
  return {group * kGroup + inside % size, inside / size};
}

struct Tile {
  int expert = 0;
  int column = 0;      // tile along N
  int first_row = 0;   // of its rows: in R, or of those that the contraction runs over
  int num_rows = 0;    // how many
  int m = 0;           // first of the 128 along M; along R: first_row
  int height = 0;      // how many of the 128 exist; 0 or less: this block only helps its neighbour
  bool shared = true;  // both blocks of the pair want the same B
  int chunk = 0, num_chunks = 1;  // of the contraction: WeightTiles
  int slot = 0;                   // where the sums of chunk 0 are kept: a number of pairs
};

/// The expert with starts[expert] <= index < starts[expert + 1].
constexpr int expert_at(const int* starts, int num_experts, int index) {
  int low = 0, high = num_experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (starts[middle] <= index ? low : high) = middle;
  }
  return low;
}

/// Tiles of the rows of experts, in pairs of an expert's own; so they share B. The last tiles of
/// two experts with an odd number of them, one after the other in the row of such experts, are a
/// pair of the second expert, which shares nothing; no row is padded for it. One may be left over.
struct RowTiles {
  const int* row_starts;   // [E + 1]
  const int* pair_starts;  // [E + 1]
  const int* partners;     // [E]: the other expert of an odd pair, in the second of the two
  int num_experts, num_columns;
  int left_over;  // that expert; -1: none

  constexpr int num_pairs() const { return pair_starts[num_experts] + (left_over >= 0); }
  constexpr int size() const { return num_pairs() * num_columns; }
  constexpr int num_tiles(int expert) const {
    return ceil_div(row_starts[expert + 1] - row_starts[expert], kTileM);
  }

  constexpr Tile at(int index, int rank) const {
    const TilePlace place = place_at(index, num_pairs(), num_columns);
    const bool alone = place.pair == pair_starts[num_experts];
    Tile t;
    t.column = place.column;
    t.expert = alone ? left_over : expert_at(pair_starts, num_experts, place.pair);
    int tile =
        alone ? num_tiles(t.expert) - 1 + rank : 2 * (place.pair - pair_starts[t.expert]) + rank;
    if (!alone && tile - rank + 1 >= num_tiles(t.expert)) {  // the pair that is odd
      t.shared = false;
      if (rank == 0) t.expert = partners[t.expert];
      tile = num_tiles(t.expert) - 1;
    }
    t.first_row = t.m = row_starts[t.expert] + tile * kTileM;
    t.num_rows = t.height = smaller(kTileM, row_starts[t.expert + 1] - t.first_row);
    if (t.num_rows <= 0) t.first_row = t.m = row_starts[t.expert], t.num_rows = t.height = 0;
    return t;
  }
};

// The contraction of the gradient of a weight runs over the rows of its expert. Experts come by
// their rows, most first, so that the last tiles are the short ones. Where a few experts have the
// rows, there are as few tiles, all of them long: these are cut into chunks of `longest` steps or
// less. Sums of chunks are added in their order.

inline constexpr int kMinChunk = 8;         // steps
inline constexpr int kMaxChunkPairs = 200;  // pairs of tiles of experts in chunks, chunks counted

/// Steps of an expert with `num_rows` rows; one without rows gets one, of zeros.
constexpr int steps_of(int num_rows) { return num_rows > 0 ? ceil_div(num_rows, kTileK) : 1; }
/// The chunks of `steps`.
constexpr int num_chunks(int steps, int longest) { return ceil_div(steps, longest); }
/// The first step of a chunk.
constexpr int chunk_start(int steps, int chunk, int num_chunks) {
  return steps * chunk / num_chunks;
}
/// Pairs of tiles of experts in chunks that a layer of R rows can have, chunks counted.
constexpr int max_chunk_pairs(long long num_rows, int pairs_of_expert) {
  constexpr int kRows = kMinChunk * kTileK;
  if (num_rows <= kRows) return 0;
  const long long most = (num_rows + kRows - 1) / kRows * pairs_of_expert;
  return most < kMaxChunkPairs ? static_cast<int>(most) : kMaxChunkPairs;
}
/// Numbers of a pair in memory: the sums of four slabs, and how many chunks of each are there.
inline constexpr int kChunkSums = 4 * kSlab * kTileN, kChunkCounts = 4;

/// The time that an expert adds to the first cluster, in steps, if none of its chunks has more than
/// `longest`. Its pairs begin at `start`, of which the clusters take turns.
constexpr int time_of_chunks(int steps, int start, int pairs_of_expert, int num_clusters,
                             int longest) {
  constexpr int kFinish = 1, kAdd = 28;  // besides its steps: of every tile, of a chunk (measured)
  const int chunks = num_chunks(steps, longest), end = start + pairs_of_expert * chunks;
  const int mine = ceil_div(end, num_clusters) - ceil_div(start, num_clusters);
  return mine * (ceil_div(steps, chunks) + kFinish + (chunks > 1 ? kAdd : 0));
}

/// The candidates for `longest`; the fastest is taken, and the first of equals. Where there are
/// many tiles it is the first, no chunks at all.
inline constexpr int kCandidates = 12;
constexpr int longest_chunk(int most_steps, int candidate) {
  const int longest = ceil_div(most_steps, candidate + 1);
  return candidate > 0 && longest < kMinChunk ? kMinChunk : longest;
}
constexpr bool has_many_tiles(int most_steps, int num_rows, int pairs_of_expert, int num_clusters) {
  return 4ll * most_steps * num_clusters <= 1ll * num_rows / kTileK * pairs_of_expert;
}

/// Tiles of a matrix per expert, [height, num_columns tiles], and their chunks: expert after expert
/// and chunk after chunk, so that the rows, which all of the tiles read, stay in L2. Tiles are
/// found without a search, but for those in chunks, which come first.
struct WeightTiles {
  const int* row_starts;   // [E + 1]
  const int* pair_starts;  // [E + 1], in the order of order_E
  const int* order_E;
  int num_experts, height, num_columns;
  int longest, num_cut;  // the most steps of a chunk; how many experts are in chunks

  constexpr int pairs_of_expert() const { return ceil_div(height, 2 * kTileM) * num_columns; }
  constexpr int size() const { return pair_starts[num_experts]; }

  constexpr Tile at(int index, int rank) const {
    const int per_chunk = pairs_of_expert(), first_whole = pair_starts[num_cut];
    const bool whole = index >= first_whole;
    const int at = whole ? num_cut + (index - first_whole) / per_chunk
                         : expert_at(pair_starts, num_cut, index);
    Tile t;
    t.expert = order_E[at];
    t.first_row = row_starts[t.expert];
    t.num_rows = row_starts[t.expert + 1] - t.first_row;
    int inside = index - (whole ? first_whole + (at - num_cut) * per_chunk : pair_starts[at]);
    if (!whole) {
      const int steps = steps_of(t.num_rows);
      t.num_chunks = cuda::num_chunks(steps, longest);
      t.chunk = inside / per_chunk;
      inside -= t.chunk * per_chunk;
      t.slot = pair_starts[at] + inside;
      const int start = chunk_start(steps, t.chunk, t.num_chunks) * kTileK;
      const int end = chunk_start(steps, t.chunk + 1, t.num_chunks) * kTileK;
      t.first_row += start;
      t.num_rows = smaller(end, t.num_rows) - start;
    }
    const TilePlace place = place_at(inside, ceil_div(height, 2 * kTileM), num_columns);
    t.column = place.column;
    t.m = (2 * place.pair + rank) * kTileM;
    t.height = smaller(kTileM, height - t.m);
    return t;
  }
};

}  // namespace moesh::kernels::cuda
