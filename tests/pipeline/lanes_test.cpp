#include "moesh/pipeline/simulate.h"

#include <gtest/gtest.h>

namespace moesh::pipeline {
namespace {

// Two of a layer each: computes 3, rows travel 2, computes 4, rows travel 2.
const Lane kLayer{{.compute = 3, .message = 2}, {.compute = 4, .message = 2}};

TEST(Lanes, OneByItselfWaitsForEveryMessage) {
  EXPECT_DOUBLE_EQ(seconds_in_turns({kLayer}), 11);
  EXPECT_DOUBLE_EQ(seconds_apart(kLayer), 11);
  EXPECT_DOUBLE_EQ(seconds_in_turns({}), 0);
}

// 3 3 4 4 and the last message: the others travel while one of them computes.
TEST(Lanes, RowsTravelBehindTheComputeOfTheOther) {
  EXPECT_DOUBLE_EQ(seconds_in_turns({kLayer, kLayer}), 3 + 3 + 4 + 4 + 2);
}

// Rows leave at 3 and at 6, and arrive at 13 and 23: one message after the other.
TEST(Lanes, ALinkCarriesOneMessageAfterTheOther) {
  const Lane lane{{.compute = 3, .message = 10}};
  EXPECT_DOUBLE_EQ(seconds_in_turns({lane, lane}), 23);
  const Lane other{{.compute = 3, .message = 10, .link = RowLink::inside}};
  EXPECT_DOUBLE_EQ(seconds_in_turns({lane, other}), 16);
}

// Counts are awaited at once, behind the rows of the other one.
TEST(Lanes, WhatDoesNotTakeTurnsHoldsTheRankUp) {
  const Lane first{{.compute = 1, .message = 10}, {.compute = 1}};
  const Lane second{{.compute = 1, .message = 1, .takes_turns = false}, {.compute = 5}};
  EXPECT_DOUBLE_EQ(seconds_in_turns({first, second}), 12 + 5 + 1);
}

// While a message travels for 3, 2 of 4 are computed, and the other 2 afterwards.
TEST(Lanes, ComputingIsSlowerWhileRowsTravel) {
  const Lane first{{.message = 3}}, second{{.compute = 4}};
  EXPECT_DOUBLE_EQ(seconds_in_turns({first, second}, 0.5), 5);
  EXPECT_DOUBLE_EQ(seconds_in_turns({second, first}, 0.5), 7);
}

}  // namespace
}  // namespace moesh::pipeline
