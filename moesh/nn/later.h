#pragma once
// Checks of values that are on the device, without a wait for each.

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "moesh/base/scoped_value.h"

namespace moesh::nn {

/// Throws Error (data) with text(v) where some element is wrong, v being the first that is. `wrong`
/// is bool, of the shape of `values`, which are int64. Under a CheckLater of this thread it throws
/// later.
void check_values(const at::Tensor& wrong, const at::Tensor& values,
                  const std::function<std::string(std::int64_t)>& text);

/// While it lives, checks of this thread are noted and not made: code that has read `found` from
/// the device, with whatever else it reads there, calls `raise`.
class CheckLater {
 public:
  CheckLater();

  /// The checks so far. They outlive the scope.
  struct Checks {
    std::vector<at::Tensor> found;  // int64 [2] of each: whether a value is wrong, and which
    std::vector<std::function<std::string(std::int64_t)>> texts;

    /// `found` of all of them, one after the other, on the host. Throws the first that has failed.
    void raise(const std::int64_t* found) const;
  };
  const Checks& checks() const { return checks_; }

  /// That of this thread; null: none.
  static CheckLater* current();
  /// While the result lives, this thread has that of another one, which works for the same rank.
  static ScopedValue<CheckLater*> use(CheckLater* other);

 private:
  friend void check_values(const at::Tensor&, const at::Tensor&,
                           const std::function<std::string(std::int64_t)>&);
  Checks checks_;
  ScopedValue<CheckLater*> scope_;
};

}  // namespace moesh::nn
