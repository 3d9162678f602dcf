#pragma once
// What the GPU did, as LibTorch's profiler (Kineto) saw it.

#include <cstdint>
#include <string>
#include <vector>

namespace moesh::train {

/// A kernel, or a copy of memory.
struct KernelSpan {
  std::string name;
  std::int64_t stream = 0;
  std::int64_t thread = -1;         // that launched it, as thread_number() says; -1: nobody knows
  std::int64_t begin = 0, end = 0;  // as those of a Slice
};

/// Of this thread, within its process.
std::int64_t thread_number();

/// Before the ranks are started, in the thread that loaded the program: the profiler wants it.
void prepare_kernels();

/// While it lives, records the kernels of this process. The profiler is one for all threads: the
/// first of several objects records, and the others nothing.
class RecordKernels {
 public:
  RecordKernels();
  ~RecordKernels();
  RecordKernels(const RecordKernels&) = delete;
  RecordKernels& operator=(const RecordKernels&) = delete;

  /// What was recorded, of all threads; call it once, when the device is done.
  std::vector<KernelSpan> take();

 private:
  bool is_recording_;
};

}  // namespace moesh::train
