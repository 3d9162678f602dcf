// In place of sleep.cu, where there is no CUDA compiler.
#include "moesh/comm/cuda/sleep.h"

namespace moesh::comm::cuda {

const char* sleep(void* /*stream*/, std::int64_t /*nanoseconds*/) {
  return "moesh was compiled without a CUDA compiler";
}

}  // namespace moesh::comm::cuda
