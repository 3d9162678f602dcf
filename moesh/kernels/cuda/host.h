#pragma once
// How the .cu files launch: tensor maps, and kernels of pairs of blocks.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>

#include "moesh/kernels/cuda/launch.h"

namespace moesh::kernels::cuda {

/// [z, y, x] bf16 in memory; boxes of [1, box_y, box_x], swizzled by rows of 128 bytes. What a box
/// has outside is read as zeros and not written. Sets `error` if it cannot be.
CUtensorMap tensor_map(const void* base, std::int64_t x, std::int64_t y, std::int64_t z, int box_x,
                       int box_y, Error& error);

/// [y, x] float32; boxes of [1, box_x], as they are.
CUtensorMap tensor_map(const float* base, std::int64_t x, std::int64_t y, int box_x, Error& error);

inline Error text_of(cudaError_t status) {
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

inline unsigned blocks_for(std::int64_t size, std::int64_t of_block) {
  return static_cast<unsigned>((size + of_block - 1) / of_block);
}

/// Queues a kernel, whose arguments become what it takes.
template <class... Parameters, class... Arguments>
Error launch(Stream stream, void (*kernel)(Parameters...), dim3 blocks, int threads,
             const Arguments&... arguments) {
  kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<Parameters>(arguments)...);
  return text_of(cudaGetLastError());
}

/// Setup that a kernel needs once per device.
class Prepared {
 public:
  static constexpr int kMaxDevices = 64;
  /// The number of blocks that are on the device at once, in pairs if the kernel has pairs.
  template <class Kernel>
  Error operator()(Kernel kernel, int threads, int bytes, int cluster, int& num_blocks) {
    int device = 0;
    if (Error error = text_of(cudaGetDevice(&device))) return error;
    if (device >= kMaxDevices) return "there are more than 64 devices";
    std::call_once(once_[device], [&] {
      errors_[device] = prepare(kernel, threads, bytes, cluster, blocks_[device]);
    });
    num_blocks = blocks_[device];
    return errors_[device];
  }

 private:
  template <class Kernel>
  static Error prepare(Kernel kernel, int threads, int bytes, int cluster, int& num_blocks) {
    if (Error error = text_of(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)))
      return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = cluster, config.blockDim = threads, config.dynamicSmemBytes = bytes;
    config.attrs = &attribute, config.numAttrs = 1;
    int clusters = 0;
    if (Error error = text_of(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config)))
      return error;
    if (clusters == 0) return "no block of the kernel fits on the device";
    num_blocks = clusters * cluster;
    return nullptr;
  }

  std::once_flag once_[kMaxDevices];
  Error errors_[kMaxDevices] = {};
  int blocks_[kMaxDevices] = {};
};

}  // namespace moesh::kernels::cuda
