// Which tokens each rank has, counted one by one: B sequences of L positions on every dp rank, the
// positions in pieces of ceil(L / (cp tp)).

#include "moesh/nn/tokens.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "moesh/comm/launch.h"

namespace moesh {
namespace {

using Numbers = std::vector<std::int64_t>;

struct CutCase {
  MeshShape shape;
  std::int64_t batch, sequence;
  bool sequence_parallel;
};

// A rank's place, with the last axis fastest.
struct PlaceOf {
  std::int64_t dp, cp, tp;
};
PlaceOf place_of(const MeshShape& s, int rank) {
  return {rank / (s.cp * s.tp), rank / s.tp % s.cp, rank % s.tp};
}

std::int64_t cut(const CutCase& c, std::int64_t piece) {  // where a piece of the sequence begins
  const std::int64_t pieces = c.shape.cp * c.shape.tp;
  return std::min(piece * ((c.sequence + pieces - 1) / pieces), c.sequence);
}

// The positions of a cp rank, and of one tp rank of it.
std::pair<std::int64_t, std::int64_t> span(const CutCase& c, std::int64_t cp) {
  return {cut(c, cp * c.shape.tp), cut(c, (cp + 1) * c.shape.tp)};
}
std::pair<std::int64_t, std::int64_t> piece(const CutCase& c, std::int64_t cp, std::int64_t tp) {
  return {cut(c, cp * c.shape.tp + tp), cut(c, cp * c.shape.tp + tp + 1)};
}

// The global numbers of a rank's tokens, in the order in which it has them.
Numbers expected_ids(const CutCase& c, int rank) {
  const auto [dp, cp, tp] = place_of(c.shape, rank);
  const auto [begin, end] = c.sequence_parallel ? piece(c, cp, tp) : span(c, cp);
  Numbers held;
  for (std::int64_t b = 0; b < c.batch; ++b)
    for (std::int64_t position = begin; position < end; ++position)
      held.push_back((dp * c.batch + b) * c.sequence + position);
  if (c.sequence_parallel) return held;
  const auto n = static_cast<std::int64_t>(held.size());
  const std::int64_t share = (n + c.shape.tp - 1) / c.shape.tp;
  return Numbers(held.begin() + std::min(tp * share, n),
                 held.begin() + std::min((tp + 1) * share, n));
}

Numbers numbers(const at::Tensor& t) {
  return Numbers(t.data_ptr<std::int64_t>(), t.data_ptr<std::int64_t>() + t.numel());
}

void expect_cuts(const CutCase& c, const nn::Tokens& tokens, const Mesh& mesh, int rank) {
  const auto [dp, cp, tp] = place_of(c.shape, rank);
  Numbers spans, pieces, rows;
  for (std::int64_t i = 0; i < c.shape.cp; ++i)
    spans.push_back(span(c, i).second - span(c, i).first);
  for (std::int64_t i = 0; i < c.shape.tp; ++i) {
    pieces.push_back(piece(c, cp, i).second - piece(c, cp, i).first);
    const auto other = static_cast<int>(rank - tp + i);
    rows.push_back(static_cast<std::int64_t>(expected_ids(c, other).size()));
  }
  EXPECT_EQ(tokens.over_cp().sizes, spans);
  EXPECT_EQ(tokens.over_cp().dim, 1);
  EXPECT_EQ(tokens.over_tp().sizes, pieces);
  EXPECT_EQ(tokens.over_tp().dim, 1);
  EXPECT_EQ(tokens.rows(*mesh.group(Axes::tp)), rows);
  const auto [begin, end] = c.sequence_parallel ? piece(c, cp, tp) : span(c, cp);
  EXPECT_EQ(tokens.length(), end - begin);
  EXPECT_EQ(tokens.mine_start(), begin);
  EXPECT_EQ(tokens.span_start(), span(c, cp).first);
  EXPECT_EQ(tokens.span_length(), spans[static_cast<size_t>(cp)]);
  const at::Tensor positions = at::arange(c.sequence, at::kLong).expand({2, c.sequence});
  EXPECT_TRUE(at::equal(tokens.mine(positions), positions.slice(1, begin, end)));
  EXPECT_TRUE(at::equal(tokens.my_span(positions),
                        positions.slice(1, span(c, cp).first, span(c, cp).second)));
}

// What one rank says of its tokens; returns their numbers.
Numbers expect_tokens(const CutCase& c, const Mesh& mesh, int rank) {
  const nn::Tokens tokens(mesh, c.batch, c.sequence, c.sequence_parallel);
  const Numbers ids = numbers(tokens.global_ids());
  EXPECT_EQ(ids, expected_ids(c, rank));
  EXPECT_EQ(tokens.num_local(), static_cast<std::int64_t>(ids.size()));
  EXPECT_EQ(tokens.num_global(), c.shape.dp_replicate * c.shape.dp_shard * c.batch * c.sequence);
  Numbers sequences;
  for (auto id : ids) sequences.push_back(id / c.sequence - place_of(c.shape, rank).dp * c.batch);
  EXPECT_EQ(numbers(tokens.sequence_ids()), sequences);
  EXPECT_TRUE(at::equal(tokens.members(at::kCPU, at::kFloat),
                        at::one_hot(tokens.sequence_ids(), c.batch).t().to(at::kFloat)));
  expect_cuts(c, tokens, mesh, rank);
  return ids;
}

// With remainders and with fewer tokens than ranks.
TEST(Tokens, EveryTokenHasOneOwnerAndItsOwnNumber) {
  for (const MeshShape& shape : {MeshShape{}, MeshShape{.tp = 2}, MeshShape{.dp_shard = 2, .cp = 3},
                                 MeshShape{.dp_shard = 3, .tp = 2}, MeshShape{.cp = 2, .tp = 3},
                                 MeshShape{.dp_replicate = 2, .dp_shard = 3, .cp = 2, .tp = 4}}) {
    std::vector<std::unique_ptr<Mesh>> meshes;
    for (int rank = 0; rank < shape.num_ranks(); ++rank)
      meshes.push_back(std::make_unique<Mesh>(shape, rank, comm::fake_group));
    for (std::int64_t batch : {1, 3})
      for (std::int64_t sequence : {1, 7, 16})
        for (bool sequence_parallel : {true, false}) {
          const CutCase c{shape, batch, sequence, sequence_parallel};
          SCOPED_TRACE(testing::Message() << shape.describe() << ", batch " << batch << ", length "
                                          << sequence << ", sp " << sequence_parallel);
          Numbers all;
          for (int rank = 0; rank < shape.num_ranks(); ++rank)
            for (auto id : expect_tokens(c, *meshes[static_cast<size_t>(rank)], rank))
              all.push_back(id);
          std::ranges::sort(all);
          ASSERT_EQ(all.size(),
                    static_cast<size_t>(shape.dp_replicate * shape.dp_shard * batch * sequence));
          for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], static_cast<std::int64_t>(i));
        }
  }
}

}  // namespace
}  // namespace moesh
