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

// Noise as large as the tensor allows an error of its size, but not one along the tensor, of which
// independent elements have next to nothing.
TEST(Parity, NoiseOfElementsDoesNotExcuseAFactor) {
  at::manual_seed(1);
  const std::vector<std::int64_t> sizes{20, 50};
  const auto normal = [&](double scale) { return at::randn(sizes, at::kDouble) * scale; };
  NamedTensors reference;
  const at::Tensor expected = normal(1);
  reference.tensors.emplace_back("d(w)", expected);
  reference.noise["d(w)"] = at::full(sizes, 0.3, at::kDouble);
  for (int i = 0; i < 12; ++i) reference.off["d(w)"].push_back(normal(0.2));
  const auto first = [&](const at::Tensor& found) -> std::string {
    Findings findings(1, reference, 1e-4);
    findings.compare({"d(w)", found, [](const at::Tensor& t) { return t; }}, 0);
    const auto mismatches = findings.mismatches({});
    return mismatches.empty() ? "" : mismatches[0].describe({});
  };
  EXPECT_EQ(first(expected + normal(0.3)), "");
  EXPECT_EQ(first(expected * 1.02), "");
  EXPECT_NE(first(expected * 1.2).find("along the reference"), std::string::npos);
  EXPECT_NE(first(expected + normal(3)), "");
  // Each expert by itself: 1.5 times one of 20 is a small factor of all.
  at::Tensor one = expected.clone();
  one[7].mul_(1.5);
  EXPECT_EQ(first(one), "");
  Findings findings(1, reference, 1e-4);
  RankTensor tensor{"d(w)", one, [](const at::Tensor& t) { return t; }};
  tensor.by_expert = true;
  findings.compare(tensor, 0);
  EXPECT_EQ(findings.mismatches({}).size(), 1u);
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
