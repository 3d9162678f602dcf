#pragma once
// A CUDA graph: what was given to a stream once, done again by one call of the host.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

namespace moesh::kernels {

class Graph {
 public:
  virtual ~Graph() = default;
  /// Does what was recorded, on the memory that it used then.
  virtual void replay() = 0;
};

/// Why there are no graphs on this device: "" if there are.
std::string refuses_graphs(c10::Device device);

/// Work that f queues on the current stream (not the default one) is recorded and not done. f has
/// run a few times before. What f throws comes out of here, for instance because f waits for the
/// device; then nothing of it has been done. Memory that the allocator keeps for later is given
/// back first: a graph has its own, or that of `beside`. Graphs that have memory together take as
/// much as the largest of them: before one is replayed, what another left there has been read.
std::unique_ptr<Graph> record_graph(const std::function<void()>& f, const Graph* beside);

/// How steps become graphs. A test on the CPU has a way of its own.
struct Graphs {
  std::function<std::string(c10::Device)> refuses = refuses_graphs;
  std::function<std::unique_ptr<Graph>(const std::function<void()>& f, const Graph* beside)>
      record = record_graph;
};

/// A tensor from before the recording that is read in it, and that its owner may let go before the
/// graph is gone: the graph which this thread records now, if it does, keeps it.
void keep_for_graph(const at::Tensor& t);

}  // namespace moesh::kernels
