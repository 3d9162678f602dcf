#include "moesh/verify/parity.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

namespace moesh::verify {
namespace {

// What one rank says of `value` where the reference has `expected`.
bool holds(double value, double expected) {
  NamedTensors reference;
  reference.tensors.emplace_back("logits", at::full({2, 3}, expected, at::kDouble));
  Findings findings(1, reference, 1e-3);
  findings.compare(
      {"logits", at::full({2, 3}, value, at::kDouble), [](const at::Tensor& t) { return t; }}, 0);
  return findings.mismatches({}).empty();
}

TEST(Parity, HoldsWithinTheToleranceAlone) {
  EXPECT_TRUE(holds(1, 1));
  EXPECT_TRUE(holds(1.0005, 1));
  EXPECT_FALSE(holds(1.002, 1));
}

// An infinite reference makes an infinite tolerance of a relative one.
TEST(Parity, NothingHoldsWhereOneSideIsNotFinite) {
  for (const double bad : {double{INFINITY}, -double{INFINITY}, double{NAN}}) {
    EXPECT_FALSE(holds(1, bad)) << bad;
    EXPECT_FALSE(holds(bad, 1)) << bad;
    EXPECT_FALSE(holds(bad, bad)) << bad;
  }
}

}  // namespace
}  // namespace moesh::verify
