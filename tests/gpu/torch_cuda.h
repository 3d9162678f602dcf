#pragma once
// What tests and benchmarks want of LibTorch's CUDA side. Its headers need the CUDA toolkit and are
// only in torch_cuda.cpp; a LibTorch without CUDA has none, and no_torch_cuda.cpp says so.

#include <functional>

#include "moesh/kernels/graph.h"

namespace moesh::gpu {

/// How often this thread waits for the device in f, as LibTorch sees it: copies to or from the host
/// that are waited for, streams and events that are synchronised.
int count_waits(const std::function<void()>& f);

/// A graph that has its memory to itself.
class Graph {
 public:
  explicit Graph(const std::function<void()>& f) : graph_(kernels::record_graph(f, nullptr)) {}
  void replay() { graph_->replay(); }

 private:
  std::unique_ptr<kernels::Graph> graph_;
};

/// The milliseconds between the beginning and the end of what f gives to the current stream; waits.
float milliseconds(const std::function<void()>& f);

}  // namespace moesh::gpu
