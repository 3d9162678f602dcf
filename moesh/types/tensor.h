#pragma once
// A tensor whose layout is part of its type. It never turns into a plain one by itself: one way in
// (`assume`), one way out (`local`). Plain is at::Tensor in moesh; a fake serves in tests.

#include <type_traits>
#include <utility>

#include "moesh/types/transition.h"

namespace moesh {

template <auto L, class Plain>
  requires Layout<std::remove_const_t<decltype(L)>>  // g++ 12 says const here
class Typed {
 public:
  static constexpr auto layout = L;
  using Gradient = Typed<adjoint(L), Plain>;

  Typed() = default;
  /// The way in: a promise that x is laid out as L. Greppable: tests/layers_test.py has the list.
  static Typed assume(Plain x) { return Typed(std::move(x)); }
  /// The way out: what this rank holds, as a plain tensor.
  const Plain& local() const { return plain_; }
  operator Plain() const = delete;  // not by itself: local(x) is the way out

 private:
  explicit Typed(Plain x) : plain_(std::move(x)) {}
  Plain plain_;
};

}  // namespace moesh
