#pragma once
// A CUDA graph: what was given to a stream once, done again by one call of the host.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

namespace moesh::kernels {

/// Why there are no graphs on this device: "" if there are.
std::string refuses_graphs(c10::Device device);

/// What f gives to the current stream (not the default one) is recorded and not done; `replay` does
/// it, as often as it is asked, on the memory that f used. f has run a few times before. What f
/// throws comes out of the constructor, for instance because f waits for the device; then nothing
/// of it has been done. Memory that the allocator keeps for later is given back first: a graph has
/// its own.
class Graph {
 public:
  explicit Graph(const std::function<void()>& f);
  ~Graph();
  void replay();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// A tensor from before the recording that is read in it, and that its owner may let go before the
/// graph is gone: the graph which this thread records now, if it does, keeps it.
void keep_for_graph(const at::Tensor& t);

}  // namespace moesh::kernels
