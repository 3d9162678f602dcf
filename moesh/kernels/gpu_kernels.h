#pragma once
// Which kernels run on an accelerator (`kernels.gpu` of a configuration): a model carries it, and a
// step of it runs under it.

#include "moesh/base/this_thread.h"

namespace moesh::kernels {

enum class GpuKernels {
  automatic,  // own kernels where they take the device, the dtype and the sizes, else LibTorch's
  own,        // own kernels, or an Error(config) that says why they cannot run
  library,    // LibTorch ops
};

const char* to_string(GpuKernels kernels);

/// The choice of this thread; automatic by default.
GpuKernels gpu_kernels();

/// The choice of this thread as long as it lives; forward and backward run in one thread.
class UseGpuKernels {
 public:
  explicit UseGpuKernels(GpuKernels kernels);

 private:
  ScopedValue<GpuKernels> scope_;
};

}  // namespace moesh::kernels
