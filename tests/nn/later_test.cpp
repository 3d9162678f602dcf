#include "moesh/nn/tokens.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/base/error.h"

namespace moesh {
namespace {

std::string named(std::int64_t value) { return "value " + std::to_string(value); }

void check_below(std::int64_t limit, const at::Tensor& values) {
  nn::check_values(values.ge(limit), values, named);
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

at::Tensor numbers(std::vector<std::int64_t> values) { return at::tensor(values, at::kLong); }

// The flags of all checks as one read from the device has them.
void raise(const nn::CheckLater& later) {
  const auto& checks = later.checks();
  const at::Tensor host = at::cat(checks.found);
  EXPECT_EQ(host.numel(), static_cast<std::int64_t>(2 * checks.texts.size()));
  checks.raise(host.const_data_ptr<std::int64_t>());
}

TEST(CheckValues, NamesTheFirstThatIsWrong) {
  EXPECT_EQ(error_of([] { check_below(9, numbers({1, 9, 8, 12}).reshape({2, 2})); }), "value 9");
  EXPECT_EQ(error_of([] { check_below(9, numbers({12, 9})); }), "value 12");
  EXPECT_EQ(error_of([] { check_below(9, numbers({12})); }), "value 12");
  check_below(9, numbers({1, 8, 0}));
  check_below(9, at::empty({0, 4}, at::kLong));
}

TEST(CheckValues, WaitsForWhoeverReadsTheFlags) {
  const nn::CheckLater later;
  check_below(9, numbers({1, 2}));
  check_below(9, numbers({3, 10}));
  check_below(9, numbers({20}));
  check_below(9, numbers({4}));
  EXPECT_EQ(later.checks().texts.size(), 4U);
  EXPECT_EQ(error_of([&] { raise(later); }), "value 10");
}

TEST(CheckValues, OfNothingWrongRaisesNothing) {
  const nn::CheckLater later;
  for (const std::int64_t value : {1, 2, 3}) check_below(9, numbers({value, 0}));
  raise(later);
}

TEST(CheckValues, AreNotedByTheInnermostScopeUntilItEnds) {
  const nn::CheckLater outer;
  {
    const nn::CheckLater inner;
    check_below(9, numbers({10}));
    EXPECT_EQ(inner.checks().texts.size(), 1U);
  }
  EXPECT_EQ(outer.checks().texts.size(), 0U);
  check_below(9, numbers({11}));
  EXPECT_EQ(error_of([&] { raise(outer); }), "value 11");
}

}  // namespace
}  // namespace moesh
