#include "moesh/types/layout.h"

#include <gtest/gtest.h>

#include <string_view>

#include "tests/types/places.h"

namespace moesh {
namespace {

using enum Place;

// The gradient of a gradient is laid out as the value: on each axis, and in every layout of both
// views.
constexpr bool adjoint_is_an_involution() {
  bool holds = true;
  for (Place p : kPlaces) holds = holds && adjoint(adjoint(p)) == p;
  const auto check = [&](auto l) { holds = holds && adjoint(adjoint(l)) == l; };
  for_each_layout<Dense>(check);
  for_each_layout<Sparse>(check);
  return holds;
}
static_assert(adjoint_is_an_involution());

static_assert(adjoint(R) == P && adjoint(P) == R && adjoint(I) == I);
static_assert(adjoint(T) == T && adjoint(F) == F && adjoint(E) == E);
static_assert(adjoint(Dense{T, R, P}) == Dense{T, P, R});
static_assert(adjoint(Sparse{I, E, F}) == Sparse{I, E, F});

static_assert(!varies(R) && !varies(I) && !varies(P) && varies(T) && varies(F) && varies(E));
static_assert(is_whole(R) && is_whole(I) && !is_whole(P) && !is_whole(T) && !is_whole(F) &&
              !is_whole(E));

// The compute axes of each view, and what they are made of.
static_assert(dp == (dp_replicate | dp_shard) && edp == (dp_replicate | efsdp) &&
              fsdp == (dp_shard | cp));
static_assert(contains(dp | cp, cp) && contains(dp, dp_shard) && !contains(dp_shard, dp) &&
              contains(tp, none));
static_assert((dp & edp) == dp_replicate && (tp & etp) == none);

// on: the letter on an axis, or the one letter on several.
static_assert(on(Dense{T, F, R}, dp) == T && on(Dense{T, F, R}, cp) == F &&
              on(Dense{T, F, R}, tp) == R);
static_assert(on(Sparse{T, E, F}, edp) == T && on(Sparse{T, E, F}, ep) == E &&
              on(Sparse{T, E, F}, etp) == F);
static_assert(on(Dense{T, T, P}, dp | cp) == T && on(Dense{P, P, P}, dp | cp | tp) == P);

// with: replaces the letter on a set of axes, and nothing else.
static_assert(with(Dense{T, T, T}, tp, R) == Dense{T, T, R});
static_assert(with(Dense{T, F, R}, dp | tp, P) == Dense{P, F, P});
static_assert(with(Sparse{T, E, R}, none, P) == Sparse{T, E, R});

static_assert(axes_with(Dense{T, T, R}, T) == (dp | cp) && axes_with(Dense{T, T, R}, R) == tp);
static_assert(axes_with(Dense{T, T, R}, P) == none &&
              axes_with(Sparse{E, E, E}, E) == (edp | ep | etp));

// on, with and axes_with agree for every layout and axis.
template <Layout L>
constexpr bool accessors_agree() {
  bool holds = true;
  for_each_layout<L>([&](L l) {
    for (Axes axis : L::axes) {
      holds = holds && contains(axes_with(l, on(l, axis)), axis);
      for (Place p : kPlaces) {
        const L changed = with(l, axis, p);
        holds = holds && on(changed, axis) == p;
        for (Axes other : L::axes)
          holds = holds && (other == axis || on(changed, other) == on(l, other));
      }
    }
  });
  return holds;
}
static_assert(accessors_agree<Dense>() && accessors_agree<Sparse>());

// What the compiler has checked above, of the same functions at run time: optimizer, checkpoint and
// verify call them there, and `make mutate` changes them only there.
constexpr bool functions_of_one_letter_hold() {
  const std::string_view letters = "RIPTFE", gradients = "PIRTFE", whole = "RI", varying = "TFE";
  for (std::size_t i = 0; i < kPlaces.size(); ++i) {
    const Place p = kPlaces[i];
    const char c = letters[i];
    if (letter(p) != c || letter(adjoint(p)) != gradients[i] ||
        is_whole(p) != (whole.find(c) != whole.npos) ||
        varies(p) != (varying.find(c) != varying.npos))
      return false;
  }
  return true;
}
static_assert(functions_of_one_letter_hold());

constexpr bool accessors_hold() {
  return contains(dp | cp, cp) && contains(dp, dp_shard) && !contains(dp_shard, dp) &&
         (dp & edp) == dp_replicate && without(dp | tp, dp_shard) == (dp_replicate | tp) &&
         places(Dense{T, F, R}) == std::array{T, F, R} &&
         places(Sparse{I, E, F}) == std::array{I, E, F} &&
         adjoint(Dense{T, R, P}) == Dense{T, P, R} && adjoint(Sparse{P, E, R}) == Sparse{R, E, P} &&
         on(Dense{T, T, P}, dp | cp) == T && on(Dense{P, P, P}, dp | cp | tp) == P &&
         with(Dense{T, F, R}, dp | tp, P) == Dense{P, F, P} &&
         with(Sparse{T, E, R}, none, P) == Sparse{T, E, R} &&
         axes_with(Dense{T, T, R}, T) == (dp | cp) && axes_with(Dense{T, T, R}, P) == none &&
         axes_with(Sparse{E, E, E}, E) == (edp | ep | etp);
}
static_assert(accessors_hold());

TEST(Layout, HoldsAtRunTimeAsAtCompileTime) {
  EXPECT_TRUE(functions_of_one_letter_hold());
  EXPECT_TRUE(accessors_hold());
  EXPECT_TRUE(adjoint_is_an_involution());
  EXPECT_TRUE(accessors_agree<Dense>());
  EXPECT_TRUE(accessors_agree<Sparse>());
}

TEST(Layout, OnRefusesAxesOfTheOtherViewAndNamesTheCrossing) {
  for (Axes axis : {ep, etp, edp, pp, none, tp | ep, dp_shard, dp | efsdp})
    EXPECT_NE(refusal([&] { on(Dense{T, T, T}, axis); }).find("cross with sparse(x) or dense(x)"),
              std::string::npos);
  for (Axes axis : {tp, cp, dp, efsdp, ep | cp})
    EXPECT_NE(refusal([&] { on(Sparse{T, T, T}, axis); }).find("cross with sparse(x) or dense(x)"),
              std::string::npos);
}

TEST(Layout, OnRefusesSeveralLettersAtOnce) {
  EXPECT_NE(refusal([] { on(Dense{T, P, R}, dp | cp); }).find("move one axis at a time"),
            std::string::npos);
  EXPECT_NE(refusal([] { on(Sparse{T, E, E}, edp | ep | etp); }).find("move one axis at a time"),
            std::string::npos);
  EXPECT_EQ(refusal([] { on(Sparse{T, E, E}, ep | etp); }), "");
}

TEST(Layout, PrintsItsLetters) {
  EXPECT_EQ(to_string(Dense{T, I, R}), "Dense{T, I, R}");
  EXPECT_EQ(to_string(Sparse{P, E, F}), "Sparse{P, E, F}");
}

}  // namespace
}  // namespace moesh
