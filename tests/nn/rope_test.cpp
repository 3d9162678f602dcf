#include "moesh/nn/rope.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "tests/support.h"

namespace moesh {
namespace {

using nn::RopeConfig;
using nn::RopeScaling;

double frequency(const RopeConfig& c, std::int64_t i) {
  return nn::rope_frequencies(c)[i].item<double>();
}

// Pairs as complex numbers, turned by e^(i position frequency).
at::Tensor turned(const at::Tensor& x_BLhd, const RopeConfig& c, std::int64_t start,
                  bool interleaved) {
  const auto half = c.dim / 2;
  const at::Tensor pairs = interleaved ? x_BLhd.unflatten(-1, {half, 2})
                                       : x_BLhd.unflatten(-1, {2, half}).transpose(-1, -2);
  const at::Tensor positions = at::arange(start, start + x_BLhd.size(1), at::kDouble);
  const at::Tensor angles = at::outer(positions, nn::rope_frequencies(c)).unsqueeze(1);
  const at::Tensor y =
      at::view_as_complex(pairs.contiguous()) * at::polar(at::ones_like(angles), angles);
  const at::Tensor real = at::view_as_real(
      y);  // [.., half, 2]; moesh lays out evens then odds, or the two halves: the same
  return at::cat({real.select(-1, 0), real.select(-1, 1)}, -1);
}

TEST(Rope, IsTheProductWithAComplexNumber) {
  const RopeConfig c{.dim = 6, .theta = 100};
  const at::Tensor x = at::randn({2, 5, 3, 6}, at::kDouble);
  for (bool interleaved : {false, true})
    for (std::int64_t start : {0, 4}) {
      const auto table = nn::rope_table(c, {{start, start + 5}}, at::kDouble, at::kCPU);
      EXPECT_TRUE(at::allclose(nn::rotate(x, table.last_features(interleaved)),
                               turned(x, c, start, interleaved), 1e-12, 1e-12));
    }
}

TEST(Rope, ScoresDependOnTheDistanceAlone) {
  const RopeConfig c{.dim = 8};
  const at::Tensor q = at::randn({1, 1, 1, 8}, at::kDouble),
                   k = at::randn({1, 1, 1, 8}, at::kDouble);
  const auto at_position = [&](const at::Tensor& x, std::int64_t p) {
    return nn::rotate(x,
                      nn::rope_table(c, {{p, p + 1}}, at::kDouble, at::kCPU).last_features(true));
  };
  const auto score = [&](std::int64_t p, std::int64_t r) {
    return (at_position(q, p) * at_position(k, r)).sum().item<double>();
  };
  EXPECT_NEAR(score(7, 3), score(107, 103), 1e-9);
  EXPECT_GT(std::abs(score(7, 3) - score(7, 4)), 1e-3);
}

TEST(Rope, YarnKeepsFastWavesAndStretchesSlowOnes) {
  const RopeConfig plain{.dim = 128, .theta = 1e4};
  RopeConfig yarn = plain;
  yarn.factor = 40, yarn.original_length = 64;
  EXPECT_EQ(frequency(yarn, 0), 1);
  EXPECT_NEAR(frequency(yarn, 17), frequency(plain, 17) / 40, 1e-15);
  const double middle = frequency(yarn, 8) / frequency(plain, 8);
  EXPECT_GT(middle, 1.0 / 40);
  EXPECT_LT(middle, 1);
}

TEST(Rope, YarnGrowsCosineAndSine) {
  RopeConfig c{.dim = 64, .theta = 150000, .factor = 32, .truncate = false};
  const auto first = [&] {
    return nn::rope_table(c, {{0, 1}}, at::kDouble, at::kCPU).cos[0][0].item<double>();
  };  // cos 0
  EXPECT_NEAR(first(), 1.3466, 1e-4);  // GPT-OSS
  EXPECT_EQ(c.attention_factor(), 1);
  c.factor = 40, c.mscale = c.mscale_all_dim = 1;
  EXPECT_EQ(first(), 1);
  EXPECT_NEAR(c.attention_factor(), std::pow(0.1 * std::log(40) + 1, 2), 1e-12);
  const auto grown = [](double scale) { return 0.1 * scale * std::log(40) + 1; };
  c.mscale = 0.7, c.mscale_all_dim = 0.5;
  EXPECT_NEAR(c.attention_factor(), std::pow(grown(0.5), 2), 1e-12);
  EXPECT_NEAR(first(), grown(0.7) / grown(0.5), 1e-12);
  const auto second = nn::rope_table(c, {{1, 2}}, at::kDouble, at::kCPU);  // angle 1
  EXPECT_NEAR(second.cos[0][0].item<double>(), std::cos(1) * grown(0.7) / grown(0.5), 1e-12);
  EXPECT_NEAR(second.sin[0][0].item<double>(), std::sin(1) * grown(0.7) / grown(0.5), 1e-12);
  c.mscale_all_dim = 0;  // one of the two says nothing without the other
  EXPECT_NEAR(first(), grown(1), 1e-12);
  c.scaling = RopeScaling::linear, c.mscale_all_dim = 1;
  EXPECT_EQ(c.attention_factor(), 1);
}

// As transformers computes it, by wave length.
TEST(Rope, Llama3StretchesByWaveLength) {
  const RopeConfig plain{.dim = 64, .theta = 5e5};
  for (const auto& [low, high] : {std::pair{1.0, 4.0}, std::pair{1.0, 1.0}}) {
    RopeConfig c = plain;
    c.scaling = RopeScaling::llama3, c.factor = 8, c.original_length = 8192, c.low_turns = low,
    c.high_turns = high;
    for (std::int64_t i = 0; i < 32; ++i) {
      const double f = frequency(plain, i), wave = 2 * std::numbers::pi / f,
                   smooth = (8192 / wave - low) / (high - low);
      const double expected = wave > 8192 / low    ? f / 8
                              : wave < 8192 / high ? f
                                                   : (1 - smooth) * f / 8 + smooth * f;
      EXPECT_NEAR(frequency(c, i), expected, 1e-15) << i << " with " << low << ", " << high;
    }
    EXPECT_EQ(nn::rope_table(c, {{0, 1}}, at::kDouble, at::kCPU).cos[0][0].item<double>(), 1);
  }
}

// Bounds at which the rule changes: a wave that turns exactly so often, and first frequencies that
// are slow over a very short original length.
TEST(Rope, Llama3AtItsBounds) {
  RopeConfig c{.dim = 8, .theta = 5e5, .factor = 8, .scaling = RopeScaling::llama3};
  c.original_length = 4, c.low_turns = c.high_turns = 4 / (2 * std::numbers::pi);
  EXPECT_EQ(frequency(c, 0), 1);  // turns just as often as what stays
  c.low_turns = 1, c.high_turns = 4;
  EXPECT_EQ(frequency(c, 0), 1.0 / 8);
}

// As transformers computes it: find_correction_range, linear_ramp_factor and get_mscale.
TEST(Rope, YarnIsItsFormula) {
  struct Case {
    std::int64_t dim;
    double theta;
    std::int64_t length;  // the original one
    bool truncate;
  };
  for (const Case& k : {Case{64, 1e4, 4096, true}, Case{64, 1.5e5, 4096, false},
                        Case{8, 10, 747, true},    // the upper bound is past the last feature
                        Case{8, 1e4, 4, true}}) {  // both bounds are the first frequency
    const RopeConfig c{.dim = k.dim,
                       .theta = k.theta,
                       .factor = 40,
                       .original_length = k.length,
                       .truncate = k.truncate};
    const auto dim = static_cast<double>(k.dim);
    const auto correction = [&](double turns) {
      return dim * std::log(static_cast<double>(k.length) / (turns * 2 * std::numbers::pi)) /
             (2 * std::log(k.theta));
    };
    double low = correction(32), high = correction(1);
    if (k.truncate) low = std::floor(low), high = std::ceil(high);
    low = low < 0 ? 0 : low, high = high > dim - 1 ? dim - 1 : high;
    if (low == high) high += 0.001;
    for (std::int64_t i = 0; i < k.dim / 2; ++i) {
      const double plain = std::pow(k.theta, -2.0 * static_cast<double>(i) / dim),
                   part = (static_cast<double>(i) - low) / (high - low),
                   ramp = part < 0   ? 0
                          : part > 1 ? 1
                                     : part;
      EXPECT_NEAR(frequency(c, i), plain * (1 - ramp) + plain / 40 * ramp, 1e-15)
          << i << " of " << k.dim << ", theta " << k.theta << ", length " << k.length;
    }
  }
}

// A factor of 1 stretches nothing, to the bit, whatever else is set.
TEST(Rope, AFactorOfOneStretchesNothing) {
  for (auto scaling : {RopeScaling::yarn, RopeScaling::llama3, RopeScaling::linear}) {
    const RopeConfig c{.dim = 128,
                       .theta = 1e4,
                       .factor = 1,
                       .scaling = scaling,
                       .mscale = 0.7,
                       .mscale_all_dim = 0.5,
                       .magnitude = 1.5};
    for (std::int64_t i = 0; i < 64; ++i)
      EXPECT_EQ(frequency(c, i), std::pow(1e4, -2.0 * static_cast<double>(i) / 128)) << i;
    EXPECT_EQ(nn::rope_table(c, {{0, 1}}, at::kDouble, at::kCPU).cos[0][0].item<double>(), 1);
    EXPECT_EQ(c.attention_factor(), 1);
  }
}

TEST(Rope, LinearStretchesAll) {
  RopeConfig c{.dim = 8, .factor = 4, .scaling = RopeScaling::linear};
  EXPECT_EQ(frequency(c, 0), 0.25);
  EXPECT_EQ(frequency(c, 3), frequency({.dim = 8}, 3) / 4);
}

TEST(Rope, LeavesTheFirstFeaturesAndHasTheTransposedMatrixAsItsGradient) {
  const RopeConfig c{.dim = 4, .theta = 100};
  const auto table = nn::rope_table(c, {{3, 8}}, at::kDouble, at::kCPU);
  const at::Tensor x = at::randn({2, 5, 3, 7}, at::kDouble).requires_grad_(true),
                   dy = at::randn({2, 5, 3, 7}, at::kDouble);
  for (bool interleaved : {false, true}) {
    const at::Tensor y = nn::rotate(x, table.last_features(interleaved));
    EXPECT_TRUE(at::equal(y.narrow(3, 0, 3), x.narrow(3, 0, 3)));
    EXPECT_TRUE(at::allclose(y.narrow(3, 3, 4), turned(x.narrow(3, 3, 4), c, 3, interleaved)));
    x.mutable_grad().reset();
    y.backward(dy);
    // <A x, dy> = <x, A' dy>
    EXPECT_NEAR((y * dy).sum().item<double>(), (x * x.grad()).sum().item<double>(), 1e-10);
  }
}

TEST(Rope, HasALineForEachPositionOfTwoRanges) {
  const RopeConfig c{.dim = 8};
  const auto both = nn::rope_table(c, {{2, 4}, {9, 12}}, at::kDouble, at::kCPU),
             all = nn::rope_table(c, {{0, 12}}, at::kDouble, at::kCPU);
  const at::Tensor positions = at::tensor({2, 3, 9, 10, 11}, at::kLong);
  EXPECT_TRUE(at::equal(both.cos, all.cos.index_select(0, positions)));
  EXPECT_TRUE(at::equal(both.sin, all.sin.index_select(0, positions)));
  nn::RopeTables tables;
  EXPECT_TRUE(at::equal(tables.at(c, {{2, 4}, {9, 12}}, at::kDouble, at::kCPU).cos, both.cos));
  EXPECT_FALSE(at::equal(tables.at(c, {{2, 7}}, at::kDouble, at::kCPU).cos, both.cos));
}

TEST(Rope, MakesTheTableOfAModelOnce) {
  nn::RopeTables tables;
  const RopeConfig c{.dim = 8};
  RopeConfig other = c;
  other.theta = 500;
  const auto at = [&](const RopeConfig& config, std::int64_t start, std::int64_t length,
                      at::ScalarType dtype = at::kFloat) {
    return tables.at(config, {{start, start + length}}, dtype, at::kCPU);
  };
  const auto first = at(c, 2, 5);
  EXPECT_TRUE(at::equal(first.cos, nn::rope_table(c, {{2, 7}}, at::kFloat, at::kCPU).cos));
  EXPECT_TRUE(at(c, 2, 5).cos.is_same(first.cos));
  EXPECT_TRUE(at(c, 2, 5, at::kBFloat16).sin.is_same(first.sin));  // both compute in float32
  EXPECT_EQ(at(c, 2, 5, at::kDouble).cos.scalar_type(), at::kDouble);
  EXPECT_FALSE(at::equal(at(c, 3, 5).cos, first.cos));
  EXPECT_FALSE(at::equal(at(other, 2, 5).cos, first.cos));
  EXPECT_EQ(at(c, 2, 6).cos.size(0), 6);
  EXPECT_TRUE(at(c, 2, 5).cos.is_same(first.cos));
  for (std::int64_t length = 10; length < 40; ++length)  // the oldest go, the one in use stays
    EXPECT_TRUE((at(c, 0, length), at(c, 2, 5).cos.is_same(first.cos)));
  for (std::int64_t length = 10; length < 40; ++length) at(c, 0, length);
  EXPECT_FALSE(at(c, 2, 5).cos.is_same(first.cos)) << "tables are not kept for ever";
}

TEST(Rope, RefusesWhatItCannotRotate) {
  expect_parts(error_of([] { nn::rope_frequencies({.dim = 5}); }, ErrorKind::config),
               {"5", "even"});
  expect_parts(error_of([] { nn::rope_frequencies({.dim = 4, .factor = 0.5}); }, ErrorKind::config),
               {"factor 0.5"});
}

// The ramp of YaRN between two frequencies that are one: a step, and never a division by zero.
TEST(Rope, YarnWithOneBoundIsAStep) {
  const RopeConfig c{.dim = 8,
                     .theta = 10000,
                     .factor = 4,
                     .scaling = RopeScaling::yarn,
                     .original_length = 64,
                     .beta_fast = 2,
                     .beta_slow = 2,
                     .truncate = false};
  for (std::int64_t i = 0; i < 4; ++i) {
    const double plain = std::pow(10000, -2.0 * static_cast<double>(i) / 8);
    const bool fast = plain * 64 / (2 * std::numbers::pi) > 2;
    EXPECT_NEAR(frequency(c, i), fast ? plain : plain / 4, 1e-15) << i;
  }
}

TEST(Rope, AMagnitudeThatIsGivenCounts) {
  const RopeConfig c{
      .dim = 4, .theta = 100, .factor = 4, .scaling = RopeScaling::yarn, .magnitude = 1.5};
  const auto table = nn::rope_table(c, {{0, 3}}, at::kDouble, at::kCPU);
  EXPECT_NEAR(table.cos[0][0].item<double>(), 1.5, 1e-15);
}

TEST(Rope, HasItsShapeWithoutNumbers) {
  const auto table = nn::rope_table({.dim = 6}, {{2, 7}}, at::kFloat, at::kMeta);
  EXPECT_EQ(table.cos.sizes(), (at::IntArrayRef{5, 3}));
  EXPECT_EQ(table.sin.sizes(), (at::IntArrayRef{5, 3}));
}

}  // namespace
}  // namespace moesh
