#include "moesh/types/tensor.h"

#include <gtest/gtest.h>

#include <memory>
#include <type_traits>

namespace moesh {
namespace {

using enum Place;

// Stands for a tensor: the types know nothing of torch. It can be moved and not copied, so a hidden
// copy would not compile.
struct Fake {
  std::unique_ptr<int> value;
};
template <auto L>
using Tensor = Typed<L, Fake>;

using Full = Tensor<Dense{T, T, R}>;
using Sum = Tensor<Dense{T, T, P}>;

// One way in, one way out: nothing converts by itself, in any direction.
static_assert(!std::is_convertible_v<Full, Fake> && !std::is_constructible_v<Fake, Full>);
static_assert(!std::is_convertible_v<Fake, Full> && !std::is_constructible_v<Full, Fake>);
static_assert(!std::is_constructible_v<Full, Sum> && !std::is_assignable_v<Full&, Sum>);
static_assert(!std::is_constructible_v<Tensor<Sparse{T, T, T}>, Tensor<Dense{T, T, T}>>);

// The layout is a value too, and the gradient's type follows from it.
static_assert(Full::layout == Dense{T, T, R});
static_assert(std::is_same_v<Full::Gradient, Sum> && std::is_same_v<Sum::Gradient, Full>);
static_assert(std::is_same_v<Tensor<Sparse{I, E, F}>::Gradient, Tensor<Sparse{I, E, F}>>);

TEST(Typed, HoldsWhatWasAssumed) {
  const Full x = Full::assume(Fake{std::make_unique<int>(7)});
  EXPECT_EQ(*x.local().value, 7);
  EXPECT_EQ(Full().local().value, nullptr);
}

TEST(Typed, WayOutDoesNotCopy) {
  const Full x = Full::assume(Fake{std::make_unique<int>(7)});
  EXPECT_EQ(&x.local(), &x.local());
  static_assert(std::is_same_v<decltype(x.local()), const Fake&>);
}

}  // namespace
}  // namespace moesh
