#pragma once
// Work that ends early, because the user no longer wants it: Ctrl-C in Python.

#include <atomic>

#include "moesh/base/error.h"
#include "moesh/base/scoped_value.h"
#include "moesh/base/this_thread.h"

namespace moesh {

/// While it lives, the interruption points of this thread throw once `is_unwanted` is true. A
/// thread that starts others for the same work hands them `current()`; null: nothing interrupts.
class Interruptible {
 public:
  explicit Interruptible(const std::atomic<bool>* is_unwanted)
      : scope_(this_thread.is_unwanted, is_unwanted) {}

  static const std::atomic<bool>* current() { return this_thread.is_unwanted; }

 private:
  ScopedValue<const std::atomic<bool>*> scope_;
};

/// Where long work may end: before a block of a model, a step, a chunk. Throws Error (internal),
/// which the code that made the thread interruptible catches.
inline void interruption_point() {
  if (const auto* flag = Interruptible::current(); flag && flag->load(std::memory_order_relaxed))
    throw Error(ErrorKind::internal, "interrupted");
}

}  // namespace moesh
