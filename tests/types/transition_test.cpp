#include "moesh/types/transition.h"

#include <gtest/gtest.h>

#include "tests/types/places.h"

namespace moesh {
namespace {

using enum Place;

// The transitions, each row with its backward step; S stands for T, F and E. Every pair that is not
// here is refused.
struct StepRow {
  char from, to;
  Step forward, backward;
};
constexpr StepRow kSteps[] = {
    {'S', 'R', Step::all_gather, Step::reduce_scatter},  //
    {'S', 'I', Step::all_gather, Step::keep},            //
    {'P', 'S', Step::reduce_scatter, Step::all_gather},  //
    {'P', 'R', Step::all_reduce, Step::all_reduce},      //
    {'P', 'I', Step::all_reduce, Step::identity},        //
    {'I', 'R', Step::identity, Step::all_reduce},        //
    {'I', 'S', Step::keep, Step::all_gather},            //
    {'R', 'S', Step::keep, Step::pad},                   //
    {'S', 'P', Step::pad, Step::keep},                   //
};

constexpr char letter_in_table(Place p) { return varies(p) ? 'S' : letter(p); }
constexpr const StepRow* find(Place from, Place to) {
  for (const StepRow& row : kSteps)
    if (row.from == letter_in_table(from) && row.to == letter_in_table(to)) return &row;
  return nullptr;
}

// Forward and backward are what the table says, and the way back is itself in the table: closed
// under adjoints.
constexpr bool allowed_steps_hold() {
  for (Place from : kPlaces)
    for (Place to : kPlaces) {
      const StepRow* row = find(from, to);
      if (!row) continue;
      if (step(from, to) != row->forward || backward_step(from, to) != row->backward) return false;
      const StepRow* back = find(adjoint(to), adjoint(from));
      if (!back || back->forward != row->backward || back->backward != row->forward) return false;
      if (step(adjoint(to), adjoint(from)) != row->backward) return false;
    }
  return true;
}
static_assert(allowed_steps_hold());

template <Place from, Place to>
concept Steps = requires { typename std::integral_constant<Step, step(from, to)>; };

static_assert(Steps<T, R> && Steps<I, R> && !Steps<R, I> && !Steps<R, P> && !Steps<I, P> &&
              !Steps<T, F> && !Steps<T, E>);

TEST(Step, TakesTheStepsOfTheTableAtRunTime) { EXPECT_TRUE(allowed_steps_hold()); }

TEST(Step, EveryOtherPairIsRefused) {
  int allowed = 0;
  for (Place from : kPlaces)
    for (Place to : kPlaces) {
      const bool refused = refusal([&] { step(from, to); }) != "";
      EXPECT_EQ(refused, find(from, to) == nullptr) << letter(from) << " to " << letter(to);
      allowed += !refused;
    }
  EXPECT_EQ(allowed, 6 * 3 + 3);  // six rows with S, three without
}

TEST(Step, RefusalsNameTheWay) {
  for (Place from : kPlaces)
    for (Place to : kPlaces) {
      const std::string text = refusal([&] { step(from, to); });
      if (text == "") continue;
      const char* way = from == R && to == P   ? "R to P has no step of its own"
                        : from == R && to == I ? "R cannot become I"
                                               : "there is no such transition";
      EXPECT_TRUE(text.starts_with(way)) << letter(from) << " to " << letter(to) << ": " << text;
    }
  EXPECT_NE(refusal([] { step(R, P); }).find("once<axis>(x)"), std::string::npos);
  EXPECT_NE(refusal([] { step(R, I); }).find("all_reduce<axis, I>"), std::string::npos);
  EXPECT_NE(refusal([] { step(T, E); }).find("to_experts<axis>"), std::string::npos);
  EXPECT_NE(refusal([] { step(E, T); }).find("to_owners<axis>"), std::string::npos);
}

// transition: the same pairs by the name of the collective that was called.
static_assert(transition(Dense{T, T, F}, tp, R, Step::all_gather) == Dense{T, T, R});
static_assert(transition(Sparse{I, E, F}, edp, R, Step::identity) == Sparse{R, E, F});
static_assert(transition(Dense{P, P, T}, dp | cp, I, Step::all_reduce) == Dense{I, I, T});

TEST(Transition, TakesExactlyTheStepThatItsNamePromises) {
  const Step steps[] = {Step::identity,   Step::all_gather, Step::reduce_scatter,
                        Step::all_reduce, Step::keep,       Step::pad};
  for (Step want : steps)
    for (Place from : kPlaces)
      for (Place to : kPlaces) {
        const StepRow* row = find(from, to);
        const bool refused = refusal([&] { transition(Dense{T, R, from}, tp, to, want); }) != "";
        EXPECT_EQ(refused, !row || row->forward != want)
            << letter(from) << " to " << letter(to) << " by " << static_cast<int>(want);
        if (!refused) EXPECT_EQ(transition(Dense{T, R, from}, tp, to, want), (Dense{T, R, to}));
      }
}

// What each name says of what it is given, before it looks where that should go.
TEST(Transition, EveryRefusalSaysWhatIsWrongWithItsInput) {
  const auto sentence = [](Place from, Step want) -> std::string {
    const bool whole = from == R || from == I, shard = !whole && from != P;
    switch (want) {
      case Step::all_gather:
        return from == P ? "all_gather of a partial sum"
               : whole   ? "all_gather of a value that every rank has whole"
                         : "";
      case Step::all_reduce:
      case Step::reduce_scatter:
        return from != P ? "a reduction of something that is not a partial sum" : "";
      case Step::keep: return whole ? "" : "keep takes this rank's slice of a whole value";
      case Step::pad: return shard ? "" : "pad makes a shard";
      case Step::identity: return from == I ? "" : "enter takes an invariant value";
    }
    return "";
  };
  for (Step want : {Step::identity, Step::all_gather, Step::reduce_scatter, Step::all_reduce,
                    Step::keep, Step::pad})
    for (Place from : kPlaces)
      for (Place to : kPlaces) {
        const std::string text = refusal([&] { transition(Sparse{T, E, from}, etp, to, want); });
        const std::string wrong = sentence(from, want);
        const StepRow* row = find(from, to);
        if (wrong != "")
          EXPECT_TRUE(text.starts_with(wrong)) << letter(from) << ": " << text;
        else if (row && row->forward != want)
          EXPECT_EQ(text, "this function does not lead to that placement");
      }
}

TEST(Transition, RefusalsNameTheCure) {
  const auto text = [](Place from, Place to, Step want) {
    return refusal([&] { transition(Dense{T, T, from}, tp, to, want); });
  };
  EXPECT_NE(text(P, R, Step::all_gather).find("all_reduce or reduce_scatter<axis> instead"),
            std::string::npos);
  EXPECT_NE(text(R, R, Step::all_gather).find("nothing to gather"), std::string::npos);
  EXPECT_NE(text(T, R, Step::all_reduce).find("as_term<axis>(x)"), std::string::npos);
  EXPECT_NE(text(R, T, Step::reduce_scatter).find("as_term<axis>(x)"), std::string::npos);
  EXPECT_NE(text(P, T, Step::keep).find("whole value"), std::string::npos);
  EXPECT_NE(text(R, P, Step::pad).find("once<axis>(x)"), std::string::npos);
  EXPECT_NE(text(T, R, Step::identity).find("invariant"), std::string::npos);
  EXPECT_NE(text(P, P, Step::all_reduce), "");
}

// The crossing: (a, a, b) and (a, b, b) are the same tensor, there and back, and so are their
// gradients.
constexpr bool crossing_is_an_involution_and_keeps_adjoints() {
  for (Place a : kPlaces)
    for (Place b : kPlaces) {
      const Dense dense{a, a, b};
      const Sparse sparse{a, b, b};
      if (cross(dense) != sparse || cross(sparse) != dense) return false;
      if (cross(adjoint(dense)) != adjoint(sparse) || all_equal(dense) != (a == b) ||
          all_equal(sparse) != (a == b))
        return false;
    }
  return true;
}
static_assert(crossing_is_an_involution_and_keeps_adjoints());

TEST(Cross, IsAnInvolutionAtRunTime) {
  EXPECT_TRUE(crossing_is_an_involution_and_keeps_adjoints());
  for_each_layout<Dense>(
      [](Dense l) { EXPECT_EQ(all_equal(l), l.dp == l.cp && l.cp == l.tp) << to_string(l); });
}

TEST(Cross, UnequalLettersAreRefused) {
  for_each_layout<Dense>([](Dense l) {
    const std::string text = refusal([&] { cross(l); });
    EXPECT_EQ(text == "", l.dp == l.cp) << to_string(l);
    if (l.dp != l.cp) {
      EXPECT_NE(text.find("bring x to Dense{a, a, a}"), std::string::npos);
    }
  });
  for_each_layout<Sparse>([](Sparse l) {
    const std::string text = refusal([&] { cross(l); });
    EXPECT_EQ(text == "", l.ep == l.etp) << to_string(l);
    if (l.ep != l.etp) {
      EXPECT_NE(text.find("to_owners<ep>(x)"), std::string::npos);
    }
  });
}

}  // namespace
}  // namespace moesh
