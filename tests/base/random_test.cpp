#include "moesh/base/random.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <vector>

#include "moesh/base/error.h"

namespace moesh {
namespace {

// Known answers published with the Random123 library (kat_vectors, philox4x32 10 rounds).
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// Runs that were begun by one build go on with another: the numbers are those of this formula.
TEST(Random, IsAFormulaOfOneBlock) {
  const uint64_t index = 0x89abcdef01234567;
  const Random random(0x0fedcba987654321, 0xfedcba9876543210);
  const auto block = [](uint32_t low, uint32_t high) {
    return philox({low, high, 0x76543210, 0xfedcba98}, {0x87654321, 0x0fedcba9});
  };
  const auto join = [](uint32_t high, uint32_t low) { return uint64_t{high} * 0x100000000 + low; };
  const auto unit = [](uint64_t bits) { return std::ldexp(static_cast<double>(bits >> 11), -53); };
  const auto b = block(0x01234567, 0x89abcdef);
  EXPECT_EQ(random.bits(index), join(b[1], b[0]));
  EXPECT_EQ(random.uniform(index), unit(join(b[1], b[0])));
  const auto pair = block(0x8091a2b3, 0x44d5e6f7);  // of index / 2
  const double radius = std::sqrt(-2 * std::log(1 - unit(join(pair[1], pair[0])))),
               angle = 2 * std::numbers::pi * unit(join(pair[3], pair[2]));
  EXPECT_DOUBLE_EQ(random.normal(index - 1), radius * std::cos(angle));
  EXPECT_DOUBLE_EQ(random.normal(index), radius * std::sin(angle));
  EXPECT_EQ(Random(1, "foobar").stream(), 0x85944171f73967e8) << "FNV-1a, as it was published";
}

TEST(Random, DependsOnSeedStreamAndIndexAlone) {
  const Random a(7, "gate.weight"), b(7, "gate.weight"), other_stream(7, "gate.bias"),
      other_seed(8, "gate.weight");
  for (uint64_t i : {0ull, 1ull, 12345678901ull}) {
    EXPECT_EQ(a.bits(i), b.bits(i));
    EXPECT_NE(a.bits(i), other_stream.bits(i));
    EXPECT_NE(a.bits(i), other_seed.bits(i));
  }
}

TEST(Random, UniformAndNormalHaveTheirMoments) {
  const Random random(1, 2);
  constexpr int n = 200000;
  double sum = 0, normal_sum = 0, normal_squares = 0, normal_fourth = 0;
  for (int i = 0; i < n; ++i) {
    const double u = random.uniform(i), z = random.normal(i);
    ASSERT_TRUE(u >= 0 && u < 1);
    sum += u, normal_sum += z, normal_squares += z * z, normal_fourth += z * z * z * z;
  }
  EXPECT_NEAR(sum / n, 0.5, 5 * std::sqrt(1.0 / 12 / n));
  EXPECT_NEAR(normal_sum / n, 0, 5 / std::sqrt(n));
  EXPECT_NEAR(normal_squares / n, 1, 5 * std::sqrt(2.0 / n));
  EXPECT_NEAR(normal_fourth / n, 3, 5 * std::sqrt(96.0 / n));
}

TEST(Random, NormalsAreThoseOfEachIndex) {
  const Random random(9, "a stream");
  for (std::uint64_t first : {0, 1, 7, 8}) {
    for (size_t count : {0, 1, 2, 5}) {
      std::vector<double> some(count);
      random.normals(first, some);
      for (size_t i = 0; i < count; ++i) EXPECT_EQ(some[i], random.normal(first + i));
    }
  }
}

// The two values of a block are independent of each other.
TEST(Random, NeighboursDoNotCorrelate) {
  const Random random(5, 6);
  constexpr int n = 100000;
  double products = 0, squares = 0;
  for (int i = 0; i < n; ++i) {
    const double a = random.normal(2 * i), b = random.normal(2 * i + 1);
    products += a * b, squares += (a * a - 1) * (b * b - 1);
  }
  EXPECT_NEAR(products / n, 0, 5 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 0, 5 * 2 / std::sqrt(n));
}

TEST(Random, BelowCoversItsRangeEvenly) {
  const Random random(3, 4);
  std::vector<int> seen(7);
  constexpr int n = 70000;
  for (int i = 0; i < n; ++i) ++seen.at(random.below(i, 7));
  for (int count : seen) EXPECT_NEAR(count, n / 7, 5 * std::sqrt(n / 7.0));
  EXPECT_THROW(random.below(0, 0), Error);
}

}  // namespace
}  // namespace moesh
