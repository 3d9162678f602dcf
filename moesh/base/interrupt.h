#pragma once
// Work that ends early, because whoever asked for it no longer wants it: Ctrl-C in Python.

#include <atomic>
#include <utility>

namespace moesh {

/// While it lives, the interruption points of this thread throw once `is_unwanted` is true. A
/// thread that starts others for the same work hands them `current()`; null: nothing interrupts.
class Interruptible {
 public:
  explicit Interruptible(const std::atomic<bool>* is_unwanted)
      : outer_(std::exchange(current_, is_unwanted)) {}
  ~Interruptible() { current_ = outer_; }
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  static const std::atomic<bool>* current() { return current_; }

 private:
  static constinit inline thread_local const std::atomic<bool>* current_ = nullptr;
  const std::atomic<bool>* outer_;
};

[[noreturn]] void throw_interrupted();

/// Where long work may end: before a block of a model, a step, a chunk. Throws Error (internal),
/// which whoever made the thread interruptible catches.
inline void interruption_point() {
  if (const auto* flag = Interruptible::current(); flag && flag->load(std::memory_order_relaxed))
    throw_interrupted();
}

}  // namespace moesh
