// Which tokens each rank has, counted one by one: B sequences of L positions on every dp rank, the
// positions in pieces of ceil(L / (cp tp)); or, in a balanced cut, in pieces of ceil(L / (2 cp)),
// of which a cp rank has two, and these in pieces over tp.

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
  SequenceCut cut;
};

// A rank's place, with the last axis fastest.
struct PlaceOf {
  std::int64_t dp, cp, tp;
};
PlaceOf place_of(const MeshShape& s, int rank) {
  return {rank / (s.cp * s.tp), rank / s.tp % s.cp, rank % s.tp};
}

std::int64_t pieces_of(std::int64_t total, std::int64_t num) { return (total + num - 1) / num; }

// The positions of a cp rank, in its order, and those of one tp rank of it.
Numbers span(const CutCase& c, std::int64_t cp) {
  Numbers held;
  const bool is_balanced = c.cut == SequenceCut::balanced;
  const std::int64_t num = is_balanced ? 2 * c.shape.cp : c.shape.cp * c.shape.tp;
  for (std::int64_t position = 0; position < c.sequence; ++position) {
    const std::int64_t piece = position / pieces_of(c.sequence, num);
    const bool is_mine =
        is_balanced ? piece == cp || piece == num - 1 - cp : piece / c.shape.tp == cp;
    if (is_mine) held.push_back(position);
  }
  return held;
}
Numbers piece(const CutCase& c, std::int64_t cp, std::int64_t tp) {
  const Numbers of_cp = span(c, cp);
  const auto n = static_cast<std::int64_t>(of_cp.size());
  const std::int64_t stride = c.cut == SequenceCut::balanced
                                  ? pieces_of(n, c.shape.tp)
                                  : pieces_of(c.sequence, c.shape.cp * c.shape.tp);
  return Numbers(of_cp.begin() + std::min(tp * stride, n),
                 of_cp.begin() + std::min((tp + 1) * stride, n));
}

// The global numbers of a rank's tokens, in the order in which it has them.
Numbers expected_ids(const CutCase& c, int rank) {
  const auto [dp, cp, tp] = place_of(c.shape, rank);
  Numbers held;
  for (std::int64_t b = 0; b < c.batch; ++b)
    for (const std::int64_t position : c.sequence_parallel ? piece(c, cp, tp) : span(c, cp))
      held.push_back((dp * c.batch + b) * c.sequence + position);
  if (c.sequence_parallel) return held;
  const auto n = static_cast<std::int64_t>(held.size());
  const std::int64_t share = (n + c.shape.tp - 1) / c.shape.tp;
  return Numbers(held.begin() + std::min(tp * share, n),
                 held.begin() + std::min((tp + 1) * share, n));
}

Numbers numbers(const at::Tensor& x) {
  const at::Tensor t = x.contiguous();
  return Numbers(t.data_ptr<std::int64_t>(), t.data_ptr<std::int64_t>() + t.numel());
}

std::int64_t size(const Numbers& numbers) { return static_cast<std::int64_t>(numbers.size()); }

void expect_cuts(const CutCase& c, const nn::Tokens& tokens, const Mesh& mesh, int rank) {
  const auto [dp, cp, tp] = place_of(c.shape, rank);
  Numbers spans, pieces, rows, one_by_one, gathered;
  for (std::int64_t i = 0; i < c.shape.cp; ++i) {
    const Numbers other = span(c, i);
    spans.push_back(size(other));
    one_by_one.insert(one_by_one.end(), other.begin(), other.end());
  }
  for (std::int64_t i = 0; i < c.shape.tp; ++i) {
    pieces.push_back(size(piece(c, cp, i)));
    const Numbers others = expected_ids(c, static_cast<int>(rank - tp + i));
    rows.push_back(size(others));
    for (const std::int64_t id : others) gathered.push_back(id - dp * c.batch * c.sequence);
  }
  EXPECT_EQ(tokens.over_cp().sizes, spans);
  EXPECT_EQ(tokens.over_cp().dim, 1);
  EXPECT_EQ(tokens.over_tp().sizes, pieces);
  EXPECT_EQ(tokens.over_tp().dim, 1);
  EXPECT_EQ(tokens.rows(*mesh.group(Axes::tp)), rows);
  const Numbers mine = c.sequence_parallel ? piece(c, cp, tp) : span(c, cp);
  EXPECT_EQ(tokens.length(), size(mine));
  EXPECT_EQ(tokens.span_length(), spans[static_cast<size_t>(cp)]);
  const at::Tensor positions = at::arange(c.sequence, at::kLong).expand({2, c.sequence});
  const auto rows_of = [](const Numbers& of) { return at::tensor(of, at::kLong).expand({2, -1}); };
  EXPECT_TRUE(at::equal(tokens.mine(positions), rows_of(mine)));
  EXPECT_TRUE(at::equal(tokens.my_span(positions), rows_of(span(c, cp))));
  EXPECT_TRUE(at::equal(tokens.by_span(positions), rows_of(one_by_one)));
  EXPECT_TRUE(at::equal(tokens.by_position(tokens.by_span(positions)), positions));
  EXPECT_EQ(numbers(nn::as_tensor(tokens.mine_ranges(), at::kLong)), mine);
  EXPECT_EQ(numbers(nn::as_tensor(tokens.span_ranges(), at::kLong)), span(c, cp));
  // Samples 5, 6 and so on, after 2 tokens that were seen before.
  const nn::Tokens later(mesh, c.batch, c.sequence, c.sequence_parallel, c.cut, {}, {}, 2,
                         at::arange(5, 5 + c.batch, at::kLong));
  for (std::int64_t& id : gathered) id += 5 * c.sequence;
  EXPECT_EQ(numbers(later.gathered_numbers()), gathered);
  EXPECT_TRUE(at::equal(later.span_numbers(),
                        at::arange(5, 5 + c.batch, at::kLong).unsqueeze(1) * c.sequence +
                            at::tensor(span(c, cp), at::kLong)));
  EXPECT_TRUE(at::equal(nn::as_tensor(later.positions(), at::kLong),
                        at::tensor(span(c, cp), at::kLong) + 2));
}

// What one rank says of its tokens; returns their numbers.
Numbers expect_tokens(const CutCase& c, const Mesh& mesh, int rank) {
  const nn::Tokens tokens(mesh, c.batch, c.sequence, c.sequence_parallel, c.cut);
  const Numbers ids = numbers(tokens.global_ids());
  EXPECT_EQ(ids, expected_ids(c, rank));
  EXPECT_EQ(tokens.num_local(), static_cast<std::int64_t>(ids.size()));
  EXPECT_EQ(tokens.num_global(), c.shape.dp_replicate * c.shape.dp_shard * c.batch * c.sequence);
  Numbers sequences;
  for (auto id : ids) sequences.push_back(id / c.sequence - place_of(c.shape, rank).dp * c.batch);
  EXPECT_EQ(numbers(tokens.sequence_ids()), sequences);
  EXPECT_TRUE(at::equal(tokens.members(at::kCPU, at::kFloat),
                        at::one_hot(tokens.sequence_ids(), c.batch).t().to(at::kFloat)));
  // Where tp cuts tokens as they come, a rank may have parts of sequences.
  if (c.sequence_parallel || mesh.size(tp) == 1) EXPECT_TRUE(tokens.has_equal_runs());
  if (tokens.has_equal_runs() && tokens.num_local() > 0)
    EXPECT_TRUE(at::equal(
        tokens.sequence_ids(),
        at::arange(tokens.num_local(), at::kLong).div(tokens.num_local() / c.batch, "floor")));
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
        for (bool sequence_parallel : {true, false})
          for (SequenceCut cut : {SequenceCut::contiguous, SequenceCut::balanced}) {
            const CutCase c{shape, batch, sequence, sequence_parallel, cut};
            SCOPED_TRACE(testing::Message()
                         << shape.describe() << ", batch " << batch << ", length " << sequence
                         << ", sp " << sequence_parallel
                         << (cut == SequenceCut::balanced ? ", balanced" : ""));
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
