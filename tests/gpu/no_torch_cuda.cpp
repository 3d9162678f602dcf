// Stands in for torch_cuda.cpp where LibTorch was built without CUDA.
#include "moesh/base/error.h"
#include "tests/gpu/torch_cuda.h"

namespace moesh::gpu {
namespace {
[[noreturn]] void refuse() {
  throw Error(ErrorKind::config, "this LibTorch was built without CUDA: build with make gpu");
}
}  // namespace

int count_waits(const std::function<void()>&) { refuse(); }

float milliseconds(const std::function<void()>&) { refuse(); }

}  // namespace moesh::gpu
