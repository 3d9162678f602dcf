#pragma once
// Which kernels run on an accelerator: a setting of the process (`kernels.gpu` of a configuration).

namespace moesh::kernels {

enum class GpuKernels {
  automatic,  // own kernels where they take the device, the dtype and the sizes, else LibTorch's
  own,        // own kernels, or an Error(config) that says why they cannot run
  library,    // LibTorch ops
};

const char* to_string(GpuKernels kernels);

/// Any thread may set and read it; a call that has begun is not changed.
void set_gpu_kernels(GpuKernels kernels);
GpuKernels gpu_kernels();

}  // namespace moesh::kernels
