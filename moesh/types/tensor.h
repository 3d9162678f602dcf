#pragma once
// A tensor whose layout is part of its type. It never turns into a plain one by itself: one way in
// (`assume`), one way out (`local`). Raw is at::Tensor in moesh; a fake serves in tests.

#include <type_traits>
#include <utility>

#include "moesh/types/transition.h"

namespace moesh {

template <auto L, class Raw>
  requires Layout<std::remove_const_t<decltype(L)>>  // g++ 12 says const here
class Typed {
 public:
  static constexpr auto layout = L;
  using Gradient = Typed<adjoint(L), Raw>;

  Typed() = default;
  /// The way in: a promise that `raw` is laid out as L. Greppable, and only nn/, spmd/ and tests
  /// use it.
  static Typed assume(Raw raw) { return Typed(std::move(raw)); }
  /// The way out: this rank's part, as a plain tensor.
  const Raw& local() const { return raw_; }
  operator Raw() const =
      delete;  // a typed tensor does not become a plain one by itself: local(x) is the way out

 private:
  explicit Typed(Raw raw) : raw_(std::move(raw)) {}
  Raw raw_;
};

}  // namespace moesh
