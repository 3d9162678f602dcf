#pragma once
// What is left of prefetches (reshard.h) when a step throws.

namespace moesh {

/// When an exception leaves its scope, the prefetches of this thread are dropped. They would be
/// found again by the address of a parameter that is no more, and waited for when the thread ends,
/// after much that a wait needs.
class ForgetPrefetched {
 public:
  ForgetPrefetched();
  ~ForgetPrefetched();
  ForgetPrefetched(const ForgetPrefetched&) = delete;
  ForgetPrefetched& operator=(const ForgetPrefetched&) = delete;

 private:
  int num_exceptions_;
};

}  // namespace moesh
