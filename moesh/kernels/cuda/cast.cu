// bfloat16 to float32, eight numbers for each thread at a time. The way back is in update.cu.

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/host.h"

namespace moesh::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 8;

__global__ void __launch_bounds__(kThreads)
    widen_kernel(const bf16* from, float* to, int64_t size) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (i + kWidth <= size) {
    float v[kWidth];
    unpack(load16(from + i), v);
    __stcs(reinterpret_cast<float4*>(to + i), float4{v[0], v[1], v[2], v[3]});
    __stcs(reinterpret_cast<float4*>(to + i) + 1, float4{v[4], v[5], v[6], v[7]});
  } else {
    for (int64_t j = i; j < size; ++j) to[j] = __bfloat162float(from[j]);
  }
}

}  // namespace

Error widen(const void* from, float* to, std::int64_t size, Stream stream) {
  if (size == 0) return nullptr;
  return launch(stream, widen_kernel, blocks_for(size, kThreads * kWidth), kThreads, from, to,
                size);
}

}  // namespace moesh::kernels::cuda
