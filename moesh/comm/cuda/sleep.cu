#include "moesh/comm/cuda/sleep.h"

namespace moesh::comm::cuda {
namespace {

__device__ std::int64_t now() {
  std::int64_t nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}

}  // namespace

// Its name is what a trace shows (kLinkKernel). __nanosleep takes up to twice what it is asked for,
// and at most a millisecond.
__global__ void sleep_on_link(std::int64_t nanoseconds) {
  const std::int64_t end = now() + nanoseconds;
  for (std::int64_t rest = nanoseconds; rest > 0; rest = end - now())
    __nanosleep(static_cast<unsigned>(rest < 40'000 ? rest / 2 : 20'000));
}

const char* sleep(void* stream, std::int64_t nanoseconds) {
  sleep_on_link<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(nanoseconds);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace moesh::comm::cuda
