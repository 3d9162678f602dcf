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
  const at::cuda::MempoolId_t pool = at::cuda::graph_pool_handle();
  // Other threads may allocate meanwhile: the one that makes the next batches does.
  graph.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  try {
    f();
  } catch (...) {
    try {
      graph.capture_end();
    } catch (const c10::Error&) {
      // Of a capture that f has broken: what f threw says more. The graph gives its pool back only
      // after a capture that was whole.
      const auto device = c10::cuda::current_device();
      c10::cuda::CUDACachingAllocator::endAllocateToPool(device, pool);
      c10::cuda::CUDACachingAllocator::releasePool(device, pool);
    }
    throw;
  }
  graph.capture_end();
}
Graph::~Graph() = default;
void Graph::replay() { parts_->graph.replay(); }

}  // namespace moesh::kernels
