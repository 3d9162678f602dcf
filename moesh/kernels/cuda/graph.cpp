#include "moesh/kernels/graph.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <exception>
#include <vector>

namespace moesh::kernels {

std::string refuses_graphs(c10::Device device) {
  return device.is_cuda() ? "" : "only CUDA devices have CUDA graphs";
}

namespace {

struct CudaGraph : Graph {
  at::cuda::MempoolId_t pool;
  at::cuda::CUDAGraph graph;
  std::vector<at::Tensor> kept;
  void replay() override { graph.replay(); }
};

// Tensors of the rank whose step is being recorded: a rank is a thread.
thread_local std::vector<at::Tensor>* kept_by_recording = nullptr;

// Graphs have pools of pinned memory in some versions of LibTorch only.
template <class Allocator>
void end_host_pool(Allocator& allocator, const at::cuda::MempoolId_t& pool) {
  if constexpr (requires { allocator.end_allocate_to_pool(pool); })
    allocator.end_allocate_to_pool(pool);
}
template <class Allocator>
void release_host_pool(Allocator& allocator, const at::cuda::MempoolId_t& pool) {
  if constexpr (requires { allocator.release_pool(pool); }) allocator.release_pool(pool);
}

// After a capture that was broken. LibTorch gives the pool of a graph back only if its capture was
// whole, and the allocator would go on asking a graph that is gone. How far its end came is not
// known, so that each of these may find nothing left to do, which it says by throwing.
void give_back(at::cuda::CUDAGraph& graph, const at::cuda::MempoolId_t& pool) {
  const auto has_thrown = [](const auto& f) {
    try {
      f();
      return false;
    } catch (const c10::Error&) {
      return true;
    }
  };
  if (!has_thrown([&] { graph.pool(); })) return;  // it was whole: the graph does it
  const auto device = c10::cuda::current_device();
  auto& host = *at::getHostAllocator(at::kCUDA);
  has_thrown([&] { c10::cuda::CUDACachingAllocator::endAllocateToPool(device, pool); });
  has_thrown([&] { end_host_pool(host, pool); });
  has_thrown([&] { c10::cuda::CUDACachingAllocator::releasePool(device, pool); });
  has_thrown([&] { release_host_pool(host, pool); });
}

}  // namespace

void keep_for_graph(const at::Tensor& t) {
  if (kept_by_recording) kept_by_recording->push_back(t);
}

std::unique_ptr<Graph> record_graph(const std::function<void()>& f, const Graph* beside) {
  auto recorded = std::make_unique<CudaGraph>();
  auto& graph = recorded->graph;
  c10::cuda::CUDACachingAllocator::emptyCache();
  recorded->pool =
      beside ? static_cast<const CudaGraph*>(beside)->pool : at::cuda::graph_pool_handle();
  // Other threads may allocate meanwhile: the one that makes the next batches does.
  graph.capture_begin(recorded->pool, cudaStreamCaptureModeThreadLocal);
  std::exception_ptr reason;
  kept_by_recording = &recorded->kept;
  try {
    f();
  } catch (...) {
    reason = std::current_exception();
  }
  kept_by_recording = nullptr;
  try {
    graph.capture_end();
  } catch (const c10::Error&) {
    if (!reason) reason = std::current_exception();  // else what f threw says more
    give_back(graph, recorded->pool);
  }
  if (reason) std::rethrow_exception(reason);
  return recorded;
}

}  // namespace moesh::kernels
