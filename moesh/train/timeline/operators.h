#pragma once
// The operators of LibTorch, in the Timeline of a rank.

#include <ATen/record_function.h>

namespace moesh::train {

/// While it lives, every operator of this thread is a slice of its Timeline: backward is, too,
/// since it runs in the very thread of the rank. LibTorch's own profiler knows of threads, and not
/// of ranks; here nothing is to be told apart afterwards, and the clock is that of all other
/// slices.
class RecordOperators {
 public:
  RecordOperators();
  ~RecordOperators();
  RecordOperators(const RecordOperators&) = delete;
  RecordOperators& operator=(const RecordOperators&) = delete;

 private:
  at::CallbackHandle handle_;
};

}  // namespace moesh::train
