#include <gtest/gtest.h>

#include "moesh/nn/sample.h"

namespace {

TEST(Sample, Loss) { EXPECT_EQ(sample::loss({3}).value, 6); }

TEST(Sample, Start) {
  EXPECT_EQ(sample::start(0, 3, 7), 0);
  EXPECT_EQ(sample::start(1, 3, 7), 3);
  EXPECT_EQ(sample::start(2, 3, 7), 6);
  EXPECT_EQ(sample::start(1, 2, 4), 2);
  EXPECT_EQ(sample::start(3, 4, 5), 5);
}

TEST(Sample, Count) { EXPECT_EQ(sample::count(3), 3); }

}  // namespace
