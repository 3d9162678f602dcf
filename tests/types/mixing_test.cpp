#include "moesh/types/mixing.h"

#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "tests/types/places.h"

namespace moesh {
namespace {

using enum Place;

// The mixing table, a row per pair: what a + b, a * b and linear(x = a, weight = b) are. x:
// refused.
struct Row {
  char a, b, add, mul, linear;
};
constexpr Row kTable[] = {
    {'R', 'R', 'R', 'R', 'R'},  //
    {'R', 'I', 'x', 'x', 'x'},  // I with anything else is refused
    {'R', 'P', 'x', 'P', 'P'},  // P times R is P, P plus a whole value is refused
    {'R', 'T', 'T', 'T', 'x'},  // a weight is never sharded by tokens
    {'R', 'F', 'F', 'F', 'F'},  // column
    {'R', 'E', 'E', 'E', 'E'}, {'I', 'R', 'x', 'x', 'x'},
    {'I', 'I', 'I', 'I', 'I'}, {'I', 'P', 'x', 'x', 'x'},
    {'I', 'T', 'x', 'x', 'x'}, {'I', 'F', 'x', 'x', 'x'},
    {'I', 'E', 'x', 'x', 'x'}, {'P', 'R', 'x', 'P', 'P'},
    {'P', 'I', 'x', 'x', 'x'}, {'P', 'P', 'P', 'x', 'x'},
    {'P', 'T', 'x', 'x', 'x'}, {'P', 'F', 'x', 'x', 'x'},
    {'P', 'E', 'x', 'x', 'x'}, {'T', 'R', 'T', 'T', 'T'},
    {'T', 'I', 'x', 'x', 'x'}, {'T', 'P', 'x', 'x', 'x'},
    {'T', 'T', 'T', 'T', 'x'}, {'T', 'F', 'x', 'x', 'x'},  // the forgotten gather
    {'T', 'E', 'x', 'x', 'x'},                             // the forgotten all-to-all
    {'F', 'R', 'F', 'F', 'x'},                             // a slice of x times a whole weight
    {'F', 'I', 'x', 'x', 'x'}, {'F', 'P', 'x', 'x', 'x'},
    {'F', 'T', 'x', 'x', 'x'}, {'F', 'F', 'F', 'F', 'P'},  // row
    {'F', 'E', 'x', 'x', 'x'}, {'E', 'R', 'E', 'E', 'E'},
    {'E', 'I', 'x', 'x', 'x'}, {'E', 'P', 'x', 'x', 'x'},
    {'E', 'T', 'x', 'x', 'x'}, {'E', 'F', 'x', 'x', 'x'},
    {'E', 'E', 'E', 'E', 'E'},
};
constexpr Op kOps[] = {Op::add, Op::mul, Op::linear};
constexpr char entry(const Row& row, Op op) {
  return op == Op::add ? row.add : op == Op::mul ? row.mul : row.linear;
}

constexpr bool table_has_every_pair_once() {
  int seen[6][6] = {};
  for (const Row& row : kTable)
    ++seen[static_cast<int>(place(row.a))][static_cast<int>(place(row.b))];
  for (const auto& line : seen)
    for (int count : line)
      if (count != 1) return false;
  return true;
}
static_assert(table_has_every_pair_once());

// A refused pair is no constant expression, so it does not compile as a template argument. That can
// be asked.
template <Op op, Place a, Place b>
concept Mixes = requires { typename std::integral_constant<Place, mix(op, a, b)>; };

template <Op op, int i>
constexpr bool entry_holds() {
  constexpr Row row = kTable[i];
  constexpr Place a = place(row.a), b = place(row.b);
  if constexpr (entry(row, op) == 'x')
    return !Mixes<op, a, b>;
  else
    return mix(op, a, b) == place(entry(row, op));
}
template <Op op>
constexpr bool table_holds() {
  return []<int... i>(std::integer_sequence<int, i...>) {
    return (entry_holds<op, i>() && ...);
  }(std::make_integer_sequence<int, 36>{});
}
static_assert(table_holds<Op::add>());
static_assert(table_holds<Op::mul>());
static_assert(table_holds<Op::linear>());

TEST(Mixing, RunTimeAgreesWithTheTableAndEveryRefusalNamesACure) {
  for (Op op : kOps)
    for (const Row& row : kTable) {
      Place result{};
      const std::string text = refusal([&] { result = mix(op, place(row.a), place(row.b)); });
      SCOPED_TRACE(::testing::Message() << row.a << " with " << row.b << ", op "
                                        << static_cast<int>(op) << ": " << text);
      if (entry(row, op) != 'x') {
        EXPECT_EQ(text, "");
        EXPECT_EQ(letter(result), entry(row, op));
      } else {
        bool has_cure = false;
        for (const char* cure :
             {"all_gather<axis>", "all_reduce", "to_experts", "use(w)", "once<axis>", "declare it"})
          has_cure = has_cure || text.find(cure) != std::string::npos;
        EXPECT_TRUE(has_cure);
      }
    }
}

// The named mistakes get their own sentence.
TEST(Mixing, NamedMistakesAreNamed) {
  const auto text = [](Op op, Place a, Place b) { return refusal([&] { mix(op, a, b); }); };
  EXPECT_NE(text(Op::linear, T, F).find("the forgotten gather: all_gather<axis>(x)"),
            std::string::npos);
  EXPECT_NE(text(Op::linear, T, E).find("the forgotten all-to-all: to_experts<axis>(x)"),
            std::string::npos);
  EXPECT_NE(text(Op::linear, F, R).find("make it F (row), or all_gather<axis>(x)"),
            std::string::npos);
  EXPECT_NE(text(Op::add, P, R).find("once<axis>(value)"), std::string::npos);
  EXPECT_NE(text(Op::mul, P, P).find("all_reduce<axis> one first"), std::string::npos);
  EXPECT_NE(text(Op::linear, R, I).find("use(w)"), std::string::npos);
}

// Every refusal says what is wrong. Rows are a, columns b, in the order R I P T F E: a letter is
// the result, a digit the sentence.
TEST(Mixing, EveryRefusalSaysWhatIsWrong) {
  const std::map<char, std::string> sentences{{'1', "takes no part in split work"},
                                              {'2', "counts it once per rank"},
                                              {'3', "is no sum of products"},
                                              {'4', "times a shard"},
                                              {'5', "make it F (row)"},
                                              {'6', "the forgotten gather"},
                                              {'7', "never sharded by tokens"},
                                              {'8', "different things vary"},
                                              {'9', "the forgotten all-to-all"}};
  const std::string tables[3][6] = {{"R12TFE", "1I1111", "21P222", "T12T88", "F128F8", "E1288E"},
                                    {"R1PTFE", "1I1111", "P13444", "T14T88", "F148F8", "E1488E"},
                                    {"R1P7FE", "1I1111", "P13444", "T14769", "5147P9", "E1478E"}};
  for (std::size_t op = 0; op < 3; ++op)
    for (std::size_t a = 0; a < 6; ++a)
      for (std::size_t b = 0; b < 6; ++b) {
        const char expected = tables[op][a][b];
        const std::string text = refusal([&] { mix(kOps[op], kPlaces[a], kPlaces[b]); });
        if (const auto found = sentences.find(expected); found == sentences.end())
          EXPECT_EQ(text, "");
        else
          EXPECT_NE(text.find(found->second), std::string::npos)
              << letter(kPlaces[a]) << " with " << letter(kPlaces[b]) << ": " << text;
      }
}

constexpr bool add_and_mul_commute() {
  for (const Row& row : kTable)
    for (const Row& swapped : kTable)
      if (row.a == swapped.b && row.b == swapped.a &&
          (row.add != swapped.add || row.mul != swapped.mul))
        return false;
  return true;
}
static_assert(add_and_mul_commute());

// Layouts mix axis by axis: a tensor-parallel MLP, column then row, on tokens; and experts with
// their hidden dimension cut.
static_assert(mix(Op::linear, Dense{T, T, R}, Dense{R, R, F}) == Dense{T, T, F});
static_assert(mix(Op::linear, Dense{T, T, F}, Dense{R, R, F}) == Dense{T, T, P});
static_assert(mix(Op::linear, Sparse{T, E, R}, Sparse{R, E, F}) == Sparse{T, E, F});
static_assert(mix(Op::linear, Sparse{T, E, F}, Sparse{R, E, F}) == Sparse{T, E, P});
static_assert(mix(Op::add, Dense{T, T, P}, Dense{T, T, P}) == Dense{T, T, P});

TEST(Mixing, LayoutsMixAxisByAxisAtRunTime) {
  EXPECT_EQ(mix(Op::linear, Dense{T, R, F}, Dense{R, R, F}), (Dense{T, R, P}));
  EXPECT_EQ(mix(Op::linear, Sparse{T, E, R}, Sparse{R, E, F}), (Sparse{T, E, F}));
  EXPECT_EQ(mix(Op::mul, Dense{P, F, T}, Dense{R, R, R}), (Dense{P, F, T}));
  EXPECT_EQ(mix(Op::mul, Dense{R, R, R}, Dense{P, F, T}), (Dense{P, F, T}));
  EXPECT_EQ(apply(Unary::nonlinear, Dense{T, R, F}), (Dense{T, R, F}));
  EXPECT_EQ(sum(Over::tokens, Dense{T, R, F}), (Dense{P, R, F}));
}

TEST(Mixing, OneRefusedAxisRefusesTheTensor) {
  EXPECT_NE(refusal([] { mix(Op::add, Dense{T, T, P}, Dense{T, T, R}); }), "");
  EXPECT_NE(refusal([] { mix(Op::add, Dense{T, I, T}, Dense{T, T, T}); }), "");
  EXPECT_NE(refusal([] { mix(Op::add, Dense{F, T, T}, Dense{T, T, T}); }), "");
}

// Functions of one tensor, a row per placement: linear, nonlinear, over features.
struct UnaryRow {
  char a, linear, nonlinear, over_features;
};
constexpr UnaryRow kUnary[] = {
    {'R', 'R', 'R', 'R'}, {'I', 'I', 'I', 'I'}, {'P', 'P', 'x', 'x'},
    {'T', 'T', 'T', 'T'}, {'F', 'F', 'F', 'x'}, {'E', 'E', 'E', 'E'},
};
static_assert(std::size(kUnary) == kPlaces.size());

// Sums of one tensor, a row per placement: over tokens, features, experts.
struct SumRow {
  char a, tokens, features, experts;
};
constexpr SumRow kSums[] = {
    {'R', 'R', 'R', 'R'}, {'I', 'I', 'I', 'I'}, {'P', 'P', 'P', 'P'}, {'T', 'P', 'T', 'T'},
    {'F', 'F', 'P', 'F'}, {'E', 'x', 'E', 'P'},  // rows at their experts are no longer "the tokens"
};
static_assert(std::size(kSums) == kPlaces.size());

constexpr bool allowed_unary_entries_hold() {
  const auto holds = [](auto rule, char a, char expected) {
    return expected == 'x' || rule(place(a)) == place(expected);
  };
  for (const UnaryRow& row : kUnary)
    if (!holds([](Place p) { return apply(Unary::linear, p); }, row.a, row.linear) ||
        !holds([](Place p) { return apply(Unary::nonlinear, p); }, row.a, row.nonlinear) ||
        !holds([](Place p) { return apply(Unary::over_features, p); }, row.a, row.over_features))
      return false;
  for (const SumRow& row : kSums)
    if (!holds([](Place p) { return sum(Over::tokens, p); }, row.a, row.tokens) ||
        !holds([](Place p) { return sum(Over::features, p); }, row.a, row.features) ||
        !holds([](Place p) { return sum(Over::experts, p); }, row.a, row.experts))
      return false;
  return true;
}
static_assert(allowed_unary_entries_hold());

void expect_rule(auto rule, char a, char expected, const char* cure) {
  Place result{};
  const std::string text = refusal([&] { result = rule(place(a)); });
  SCOPED_TRACE(::testing::Message() << a << ": " << text);
  if (expected == 'x') {
    EXPECT_NE(text.find(cure), std::string::npos);
  } else {
    EXPECT_EQ(text, "");
    EXPECT_EQ(letter(result), expected);
  }
}

TEST(Unary, RunTimeAgreesWithTheTable) {
  for (const UnaryRow& row : kUnary) {
    const char* cure = row.a == 'P' ? "all_reduce<axis>" : "all_gather<axis>";
    expect_rule([](Place p) { return apply(Unary::linear, p); }, row.a, row.linear, cure);
    expect_rule([](Place p) { return apply(Unary::nonlinear, p); }, row.a, row.nonlinear, cure);
    expect_rule([](Place p) { return apply(Unary::over_features, p); }, row.a, row.over_features,
                cure);
  }
}

TEST(Sum, RunTimeAgreesWithTheTable) {
  for (const SumRow& row : kSums) {
    expect_rule([](Place p) { return sum(Over::tokens, p); }, row.a, row.tokens, "to_owners<axis>");
    expect_rule([](Place p) { return sum(Over::features, p); }, row.a, row.features, "");
    expect_rule([](Place p) { return sum(Over::experts, p); }, row.a, row.experts, "");
  }
}

static_assert(apply(Unary::nonlinear, Dense{T, R, F}) == Dense{T, R, F});
static_assert(sum(Over::tokens, Dense{T, T, R}) ==
              Dense{P, P, R});  // counts of a token shard: P, never R
static_assert(sum(Over::tokens, Dense{T, T, T}) == Dense{P, P, P});
static_assert(sum(Over::experts, Sparse{T, E, F}) == Sparse{T, P, F});

// A letter on one axis passes check_loss or check_whole exactly where it says so here.
TEST(Guards, LossIsPartialOrInvariantOnEveryAxis) {
  static_assert(check_loss(Dense{P, I, P}) == Dense{P, I, P});
  for_each_layout<Dense>([](Dense l) {
    bool fine = true;
    for (Place p : places(l)) fine = fine && (p == P || p == I);
    EXPECT_EQ(refusal([&] { check_loss(l); }) == "", fine) << to_string(l);
  });
  EXPECT_NE(refusal([] { check_loss(Dense{P, P, R}); }).find("all_reduce<axis, I>"),
            std::string::npos);
  for (Place shard : {T, F, E})
    EXPECT_NE(refusal([&] { check_loss(Sparse{P, shard, P}); }).find("sum<Over::tokens>"),
              std::string::npos);
}

TEST(Guards, WholeIsReplicatedOrInvariantOnEveryAxis) {
  static_assert(check_whole(Sparse{R, I, R}) == Sparse{R, I, R});
  for_each_layout<Sparse>([](Sparse l) {
    bool fine = true;
    for (Place p : places(l)) fine = fine && (p == R || p == I);
    EXPECT_EQ(refusal([&] { check_whole(l); }) == "", fine) << to_string(l);
  });
  EXPECT_NE(refusal([] {
              check_whole(Dense{R, R, P});
            }).find("still a partial sum (P): all_reduce<axis>"),
            std::string::npos);
  EXPECT_NE(refusal([] { check_whole(Dense{R, R, T}); }).find("sum it and all_reduce<axis>"),
            std::string::npos);
}

}  // namespace
}  // namespace moesh
