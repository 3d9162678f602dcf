#include "moesh/types/token.h"

#include <gtest/gtest.h>

#include <string>
#include <type_traits>

namespace moesh {
namespace {

// B sequences of L tokens, s ranks, r one of them, i a local index.

static_assert(!std::is_convertible_v<LocalToken, GlobalToken> &&
              !std::is_convertible_v<GlobalToken, LocalToken>);
static_assert(!std::is_constructible_v<GlobalToken, LocalToken> &&
              !std::is_constructible_v<LocalToken, GlobalToken>);
static_assert(!std::is_convertible_v<std::int64_t, GlobalToken> &&
              !std::is_convertible_v<GlobalToken, std::int64_t>);

// Calls f(B, L, s) for every shape of the sweep.
void for_each_shape(auto f) {
  for (std::int64_t B = 1; B <= 4; ++B)
    for (std::int64_t L = 0; L <= 20; ++L)
      for (std::int64_t s = 1; s <= 9; ++s) {
        SCOPED_TRACE(::testing::Message() << "B " << B << ", L " << L << ", s " << s);
        f(B, L, s);
        if (::testing::Test::HasFatalFailure()) return;
      }
}

// The formulas written out: a local index is decoded with the true length and placed with the
// padded stride.
std::int64_t padded_stride(std::int64_t total, std::int64_t s) {
  return total / s + (total % s != 0);
}
std::int64_t true_length(std::int64_t total, std::int64_t s, std::int64_t r) {
  const std::int64_t n = padded_stride(total, s), left = total - r * n;
  return left < 0 ? 0 : left > n ? n : left;
}
std::int64_t global_of(std::int64_t L, std::int64_t s, std::int64_t r, std::int64_t i) {
  const std::int64_t n = padded_stride(L, s), length = true_length(L, s, r);
  return i / length * L + r * n + i % length;
}

// The two named mistakes.
std::int64_t batch_of_one_formula(std::int64_t B, std::int64_t L, std::int64_t s, std::int64_t r,
                                  std::int64_t i) {
  return i + r * B * true_length(L, s, r);
}
std::int64_t decoded_with_the_stride(std::int64_t L, std::int64_t s, std::int64_t r,
                                     std::int64_t i) {
  const std::int64_t n = padded_stride(L, s);
  return i / n * L + r * n + i % n;
}

TEST(SequenceShard, IsABijection) {
  for_each_shape([](std::int64_t B, std::int64_t L, std::int64_t s) {
    std::vector<int> owners(static_cast<std::size_t>(B * L));
    std::int64_t held = 0, length = 0;
    for (std::int64_t r = 0; r < s; ++r) {
      const SequenceShard shard(B, L, s, r);
      ASSERT_EQ(shard.batch(), B);
      ASSERT_EQ(shard.sequence(), L);
      ASSERT_EQ(shard.num_global(), B * L);
      ASSERT_EQ(shard.num_local(), B * shard.length());
      ASSERT_EQ(shard.start(), length) << "shards are contiguous and in order, rank " << r;
      held += shard.num_local();
      length += shard.length();
      for (std::int64_t i = 0; i < shard.num_local(); ++i) {
        const GlobalToken t = shard.global({i});
        ASSERT_TRUE(t.value >= 0 && t.value < B * L);
        ++owners[static_cast<std::size_t>(t.value)];
        ASSERT_EQ(shard.local(t), LocalToken{i});
        ASSERT_EQ(shard.owner(t), r);
        if (i > 0) {
          ASSERT_LT(shard.global({i - 1}), t) << "local order is global order";
        }
      }
    }
    ASSERT_EQ(length, L);
    ASSERT_EQ(held, B * L);
    for (int count : owners) ASSERT_EQ(count, 1) << "every token has exactly one owner";
  });
}

TEST(SequenceShard, InvertsFromTheGlobalSide) {
  for_each_shape([](std::int64_t B, std::int64_t L, std::int64_t s) {
    for (std::int64_t t = 0; t < B * L; ++t) {
      const std::int64_t r = SequenceShard(B, L, s, 0).owner({t});
      ASSERT_TRUE(r >= 0 && r < s);
      for (std::int64_t rank = 0; rank < s; ++rank) {
        const SequenceShard shard(B, L, s, rank);
        ASSERT_EQ(shard.owner({t}), r) << "every rank names the same owner";
        if (rank == r)
          ASSERT_EQ(shard.global(shard.local({t})), GlobalToken{t});
        else
          ASSERT_THROW(shard.local({t}), Error);
      }
    }
  });
}

TEST(SequenceShard, FollowsTheFormulas) {
  for_each_shape([](std::int64_t B, std::int64_t L, std::int64_t s) {
    for (std::int64_t r = 0; r < s; ++r) {
      const SequenceShard shard(B, L, s, r);
      ASSERT_EQ(shard.length(), true_length(L, s, r));
      ASSERT_EQ(shard.pieces().stride(), padded_stride(L, s));
      for (std::int64_t i = 0; i < shard.num_local(); ++i) {
        ASSERT_EQ(shard.global({i}).value, global_of(L, s, r, i));
        if (L % s == 0) {
          const std::int64_t L_loc = L / s;
          ASSERT_EQ(shard.global({i}).value, (i / L_loc) * (L_loc * s) + r * L_loc + i % L_loc);
        }
      }
    }
  });
}

// Each mistake hides: it is right wherever its condition holds, and wrong somewhere in the smallest
// shapes beyond.
TEST(SequenceShard, DiffersFromTheNamedMistakes) {
  for_each_shape([](std::int64_t B, std::int64_t L, std::int64_t s) {
    bool batch_of_one_wrong = false, stride_wrong = false, even_ranks_only = true;
    for (std::int64_t r = 0; r < s; ++r) {
      const SequenceShard shard(B, L, s, r);
      even_ranks_only =
          even_ranks_only && (shard.length() == 0 || shard.length() == shard.pieces().stride());
      for (std::int64_t i = 0; i < shard.num_local(); ++i) {
        batch_of_one_wrong =
            batch_of_one_wrong || batch_of_one_formula(B, L, s, r, i) != shard.global({i}).value;
        stride_wrong =
            stride_wrong || decoded_with_the_stride(L, s, r, i) != shard.global({i}).value;
      }
    }
    if (L % s == 0) {
      ASSERT_EQ(batch_of_one_wrong, B > 1 && s > 1 && L > 0);
    }
    ASSERT_EQ(stride_wrong, B > 1 && !even_ranks_only);
  });
}

// A wide shard is the span of its pieces: what the tp ranks of one cp rank hold together, with the
// same owners, in order.
TEST(SequenceShard, WideShardsAreBlocksOfPieces) {
  for (std::int64_t width = 1; width <= 4; ++width)
    for_each_shape([&](std::int64_t B, std::int64_t L, std::int64_t s) {
      std::int64_t held = 0;
      for (std::int64_t r = 0; r < s; ++r) {
        const SequenceShard span(B, L, s, r, width);
        std::int64_t length = 0;
        for (std::int64_t piece = r * width; piece < (r + 1) * width; ++piece) {
          const SequenceShard shard(B, L, s * width, piece);
          ASSERT_EQ(shard.length(), true_length(L, s * width, piece));
          if (shard.length() > 0) ASSERT_EQ(shard.start(), span.start() + length);
          length += shard.length();
          for (std::int64_t i = 0; i < shard.num_local(); ++i) {
            const GlobalToken t = shard.global({i});
            ASSERT_EQ(span.owner(t), r);
            ASSERT_EQ(span.global(span.local(t)), t);
          }
        }
        ASSERT_EQ(span.length(), length);
        ASSERT_EQ(span.num_local(), B * length);
        held += span.num_local();
        for (std::int64_t i = 0; i < span.num_local(); ++i)
          ASSERT_EQ(span.global({i}).value, i / length * L + span.start() + i % length);
      }
      ASSERT_EQ(held, B * L);
    });
}

// The i-th piece from the beginning and the i-th from the end, of 2 cp pieces; written out: the
// piece of a position, and from that its rank.
std::int64_t balanced_owner(std::int64_t L, std::int64_t cp, std::int64_t position) {
  const std::int64_t piece = position / padded_stride(L, 2 * cp);
  return piece < cp ? piece : 2 * cp - 1 - piece;
}

// Every token has one place on one rank, also among the tp ranks of a cp rank, and the way there
// and back is the same; local order is global order within a sequence.
TEST(SequenceShard, OfABalancedCutIsABijection) {
  for (std::int64_t B = 1; B <= 3; ++B)
    for (std::int64_t L = 0; L <= 40; ++L)
      for (std::int64_t cp = 1; cp <= 4; ++cp)
        for (std::int64_t tp = 1; tp <= 3; ++tp) {
          SCOPED_TRACE(::testing::Message()
                       << "B " << B << ", L " << L << ", cp " << cp << ", tp " << tp);
          std::vector<int> spans(static_cast<std::size_t>(B * L)), shards = spans;
          for (std::int64_t c = 0; c < cp; ++c) {
            const SequenceShard span(B, L, cp, c, tp, SequenceCut::balanced);
            ASSERT_TRUE(span.ranges().size() == 1 || span.ranges().size() == 2);
            std::vector<std::int64_t> expected, together;
            for (std::int64_t position = 0; position < L; ++position)
              if (balanced_owner(L, cp, position) == c) expected.push_back(position);
            ASSERT_EQ(span.length(), static_cast<std::int64_t>(expected.size()));
            for (std::int64_t i = 0; i < span.num_local(); ++i) {
              const GlobalToken t = span.global({i});
              ASSERT_EQ(t.value,
                        i / span.length() * L + expected[static_cast<size_t>(i % span.length())]);
              ASSERT_EQ(span.owner(t), c);
              ASSERT_EQ(span.local(t), LocalToken{i});
              ++spans[static_cast<std::size_t>(t.value)];
            }
            for (std::int64_t piece = 0; piece < tp; ++piece) {
              const SequenceShard shard = span.piece(piece);
              ASSERT_EQ(shard.length(), true_length(span.length(), tp, piece));
              ASSERT_TRUE(shard.ranges().size() == 1 || shard.ranges().size() == 2);
              for (std::int64_t i = 0; i < shard.num_local(); ++i) {
                const GlobalToken t = shard.global({i});
                ASSERT_EQ(shard.local(t), LocalToken{i});
                ++shards[static_cast<std::size_t>(t.value)];
                if (i < shard.length()) together.push_back(t.value);
              }
            }
            ASSERT_EQ(together, expected) << "pieces lie side by side in the order of the span";
          }
          for (int count : spans) ASSERT_EQ(count, 1);
          for (int count : shards) ASSERT_EQ(count, 1);
        }
}

// What Tokens takes for a tp rank is what the cut over cp x tp gives it.
TEST(SequenceShard, PiecesOfAContiguousSpanAreThoseOfTheWholeCut) {
  for (std::int64_t cp = 1; cp <= 4; ++cp)
    for (std::int64_t tp = 1; tp <= 3; ++tp)
      for (std::int64_t L = 0; L <= 40; ++L)
        for (std::int64_t r = 0; r < cp * tp; ++r) {
          const SequenceShard whole(2, L, cp * tp, r),
              piece = SequenceShard(2, L, cp, r / tp, tp).piece(r % tp);
          ASSERT_EQ(piece.ranges(), whole.ranges()) << L << ", " << cp << " x " << tp << ", " << r;
        }
}

TEST(SequenceShard, OfTwelveTokensOnThreeRanks) {
  const auto ranges = [](std::int64_t L, std::int64_t cp, std::int64_t c) {
    return SequenceShard(1, L, cp, c, 1, SequenceCut::balanced).ranges();
  };
  EXPECT_EQ(ranges(12, 3, 0), (PositionRanges{{0, 2}, {10, 12}}));
  EXPECT_EQ(ranges(12, 3, 1), (PositionRanges{{2, 4}, {8, 10}}));
  EXPECT_EQ(ranges(12, 3, 2), (PositionRanges{{4, 8}})) << "in the middle the two meet";
  EXPECT_EQ(ranges(7, 2, 0), (PositionRanges{{0, 2}, {6, 7}}));
  EXPECT_EQ(ranges(7, 2, 1), (PositionRanges{{2, 6}}));
  EXPECT_EQ(ranges(3, 4, 0), (PositionRanges{{0, 1}}));
  EXPECT_EQ(ranges(3, 4, 3), (PositionRanges{{3, 3}})) << "a rank without tokens";
  EXPECT_EQ(ranges(12, 1, 0), (PositionRanges{{0, 12}}));
}

TEST(PositionRanges, CountAndNamePositions) {
  const PositionRanges ranges{{1, 3}, {6, 7}};
  EXPECT_EQ(total_length(ranges), 3);
  EXPECT_EQ(position_at(ranges, 0), 1);
  EXPECT_EQ(position_at(ranges, 1), 2);
  EXPECT_EQ(position_at(ranges, 2), 6);
  EXPECT_THROW(position_at(ranges, 3), Error);
  EXPECT_EQ(describe(ranges), "[1, 3) and [6, 7)");
  EXPECT_EQ(describe({}), "none");
}

TEST(SequenceShard, TwoSequencesOfFiveOnTwoRanks) {
  const SequenceShard first(2, 5, 2, 0), second(2, 5, 2, 1);
  std::vector<std::int64_t> a, b;
  for (std::int64_t i = 0; i < first.num_local(); ++i) a.push_back(first.global({i}).value);
  for (std::int64_t i = 0; i < second.num_local(); ++i) b.push_back(second.global({i}).value);
  EXPECT_EQ(a, (std::vector<std::int64_t>{0, 1, 2, 5, 6, 7}));
  EXPECT_EQ(b, (std::vector<std::int64_t>{3, 4, 8, 9}));
  EXPECT_EQ(first.pieces().lengths(), (std::vector<std::int64_t>{3, 2}));
}

// The text of the Error which f throws.
std::string error_of(auto f, ErrorKind kind) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind) << e.what();
    return e.what();
  }
  return "nothing was thrown";
}

TEST(SequenceShard, RefusesAShapeThatIsNone) {
  const auto text = [](std::int64_t B, std::int64_t L, std::int64_t s, std::int64_t r) {
    return error_of([&] { SequenceShard(B, L, s, r); }, ErrorKind::config);
  };
  EXPECT_NE(text(-1, 4, 2, 0).find("batch -1"), std::string::npos);
  EXPECT_NE(text(1, -4, 2, 0).find("sequence length -4"), std::string::npos);
  EXPECT_NE(text(-2, -4, 2, 0).find("batch -2"), std::string::npos)
      << "two negative sizes have a positive product";
  EXPECT_NE(text(1, 4, 0, 0).find("part 0 of 0"), std::string::npos);
  EXPECT_NE(text(1, 4, 2, 2).find("part 2 of 2"), std::string::npos);
  EXPECT_NE(text(1, 4, 2, 2).find("0 <= part < parts"), std::string::npos);
  EXPECT_NE(text(1, 4, 2, -1).find("part -1 of 2"), std::string::npos);
  EXPECT_EQ(text(0, 0, 1, 0), "nothing was thrown");
}

TEST(Pieces, NoPartsHaveNoLength) {
  EXPECT_EQ((Pieces{5, 0}.stride()), 0);
  EXPECT_TRUE((Pieces{5, 0}.lengths().empty()));
}

// A token behind the last sequence, at a position of this very shard.
TEST(SequenceShard, RefusesTokensOfASequenceThatIsNotThere) {
  const SequenceShard shard(2, 6, 3, 1);
  EXPECT_NO_THROW(shard.local(GlobalToken{6 + shard.start()}));
  EXPECT_THROW(shard.local(GlobalToken{2 * 6 + shard.start()}), Error);
  EXPECT_THROW(shard.owner(GlobalToken{2 * 6 + shard.start()}), Error);
}

TEST(SequenceShard, RefusesTokensThatItDoesNotHave) {
  EXPECT_NE(error_of([] { SequenceShard(1, 4, 2, 0, 0); }, ErrorKind::config).find("width 0; "),
            std::string::npos);
  const SequenceShard shard(2, 5, 2, 1);  // holds 2 x 2
  const auto text = [](auto f) { return error_of(f, ErrorKind::internal); };
  EXPECT_NE(text([&] { shard.global({4}); }).find("local token 4 of a shard that holds 4"),
            std::string::npos);
  EXPECT_NE(text([&] { shard.global({-1}); }).find("local token -1"), std::string::npos);
  EXPECT_NE(text([&] { shard.local({10}); }).find("global token 10 of 10"), std::string::npos);
  EXPECT_NE(text([&] { shard.owner({-1}); }).find("global token -1"), std::string::npos);
  EXPECT_NE(text([&] {
              shard.local({7});
            }).find("global token 7 belongs to part 0, not to positions [3, 5) of part 1"),
            std::string::npos);
  EXPECT_NE(text([&] { SequenceShard(2, 0, 3, 0).owner({0}); }).find("global token 0 of 0"),
            std::string::npos);
}

}  // namespace
}  // namespace moesh
