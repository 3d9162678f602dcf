#pragma once

#include <utility>

namespace moesh {

/// Gives a variable another value for as long as it lives. For what a thread has, which code deep
/// within calls looks at.
template <class T>
class [[nodiscard]] ScopedValue {
 public:
  ScopedValue(T& variable, T value)
      : variable_(variable), outer_(std::exchange(variable, std::move(value))) {}
  ~ScopedValue() { variable_ = std::move(outer_); }
  ScopedValue(const ScopedValue&) = delete;
  ScopedValue& operator=(const ScopedValue&) = delete;

 private:
  T& variable_;
  T outer_;
};

}  // namespace moesh
