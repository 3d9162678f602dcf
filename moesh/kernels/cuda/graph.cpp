#include "moesh/kernels/graph.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>

namespace moesh::kernels {

std::string refuses_graphs(c10::Device device) {
  return device.is_cuda() ? "" : "there are CUDA graphs on CUDA devices alone";
}

struct Graph::Parts {
  at::cuda::CUDAGraph graph;
};

Graph::Graph(const std::function<void()>& f) : parts_(std::make_unique<Parts>()) {
  auto& graph = parts_->graph;
  c10::cuda::CUDACachingAllocator::emptyCache();
  // Other threads may allocate meanwhile: the one that makes the next batches does.
  graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  try {
    f();
  } catch (...) {
    try {
      graph.capture_end();
    } catch (const c10::Error&) {  // of a capture that f has broken: what f threw says more
      c10::cuda::CUDACachingAllocator::endAllocateToPool(c10::cuda::current_device(), graph.pool());
    }
    throw;
  }
  graph.capture_end();
}
Graph::~Graph() = default;
void Graph::replay() { parts_->graph.replay(); }

}  // namespace moesh::kernels
